#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B on one 910C box.
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen15_moe_a27b_gsm8k_16npu}" "$@"
