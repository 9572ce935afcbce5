#!/usr/bin/env bash
# Qwen3-30B-A3B on one 910C box. Another layout: CONFIG=grpo_qwen3_30b_a3b_gsm8k_16npu_tp4_ep4.
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen3_30b_a3b_gsm8k_16npu}" "$@"
