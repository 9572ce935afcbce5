#!/usr/bin/env bash
# Qwen1.5-MoE-A2.7B on 8 dies. See docs/ascend.md.
set -euo pipefail
CONFIG=${CONFIG:-grpo_qwen15_moe_a27b_gsm8k_8npu}
# shellcheck source=examples/grpo/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
