#!/usr/bin/env bash
# Qwen3-30B-A3B on 12 dies. Other layouts: CONFIG=grpo_qwen3_30b_a3b_gsm8k_12npu_tp4 or ..._tp4_pp3.
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen3_30b_a3b_gsm8k_12npu}" "$@"
