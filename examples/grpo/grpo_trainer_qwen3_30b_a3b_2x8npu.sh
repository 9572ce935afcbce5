#!/usr/bin/env bash
# Qwen3-30B-A3B on two nodes of 8 dies, called on each: with NODE_ADDR=A on the first, with NODE_RANK=1 MASTER_ADDR=A NODE_ADDR=B on
# the second. See docs/ascend.md.
set -euo pipefail
CONFIG=${CONFIG:-grpo_qwen3_30b_a3b_gsm8k_2x8npu}
NODES=2
# shellcheck source=examples/grpo/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
