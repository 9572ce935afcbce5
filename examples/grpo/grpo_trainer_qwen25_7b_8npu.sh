#!/usr/bin/env bash
# Qwen2.5-7B on 8 dies.
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen25_7b_gsm8k_8npu}" "$@"
