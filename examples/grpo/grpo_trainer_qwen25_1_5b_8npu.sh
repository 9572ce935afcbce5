#!/usr/bin/env bash
# Qwen2.5-1.5B on 8 dies. See docs/ascend.md.
set -euo pipefail
CONFIG=${CONFIG:-grpo_qwen25_1_5b_gsm8k_8npu}
# shellcheck source=examples/grpo/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
