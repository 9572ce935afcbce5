#!/usr/bin/env bash
# Qwen3-30B-A3B on two nodes of 8 dies, called on each (docs/ascend.md, Several nodes).
source "$(dirname "${BASH_SOURCE[0]}")/grpo_trainer.sh" "${CONFIG:-grpo_qwen3_30b_a3b_gsm8k_2x8npu}" "$@"
