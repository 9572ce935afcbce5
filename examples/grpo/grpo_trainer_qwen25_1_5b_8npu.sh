#!/usr/bin/env bash
# Qwen2.5-1.5B on 8 dies.
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen25_1_5b_gsm8k_8npu}" "$@"
