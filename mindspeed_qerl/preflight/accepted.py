"""Checks that may fail: `run.accepted_checks`, for a check that is wrong about a machine
(docs/troubleshooting.md).
"""

from collections.abc import Iterable
from dataclasses import replace

from mindspeed_qerl.common.errors import unknown
from mindspeed_qerl.preflight.case import ACCEPTED, FAILED, PASSED, Check, plain
from mindspeed_qerl.preflight.software import VERSIONS

KEY = "run.accepted_checks"
# Every check that can fail, but for `ranks`, which sums up those of NPUs, and for what the engine
# refuses by itself: config, shape, layout and upstream's sources.
NAMES = (
    "npu-smi",
    "/dev/davinci*",
    "CANN",
    "ASCEND_RT_VISIBLE_DEVICES",
    "Ray",
    "dies of a node",
    "CPUs",
    "run.root",
    "/tmp",
    "disk for the run",
    "disk for the base",
    "disk for the data",
    "host memory",
    "memory to convert",
    "ports of HCCL",
    "ports of Ray",
    "NODE_ADDR",
    "MASTER_ADDR",
    "CANN's paths",
    "CANN's version",
    "NNAL",
    "driver",
    "Megatron's helpers",
    "MindSpeed's operators",
    "VLLM_ASCEND_ENABLE_NZ",
    "VLLM_USE_V1",
    "VLLM_VERSION",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "HCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HCCL_IF_IP",
    "RANK_TABLE_FILE",
    "PYTORCH_NPU_ALLOC_CONF",
    "HCCL_OP_EXPANSION_MODE",
    "OMP_PROC_BIND",
    "VLLM_PLUGINS",
    "Python",
    *VERSIONS,
    "vLLM's platform",
    "imports of a worker",
    "memory of an NPU",
    "context",
    "vocabulary",
    "tokenizer",
    "weights",
    "training rows",
    "training files",
    "labels",
    "prompt lengths",
    "token ids",
    "test rows",
    "train and test",
    "base weights",
)
PLAIN = {plain(name): name for name in NAMES}


def accept(checks: Iterable[Check], names: Iterable[str]) -> list[Check]:
    """The checks with those that failed and are named `accepted`, and a line for names that are
    none or not needed.
    """
    checks, wanted = list(checks), list(dict.fromkeys(map(plain, names)))
    failed = {plain(check.name) for check in checks if check.state == FAILED}
    checks = [
        replace(check, state=ACCEPTED)
        if check.state == FAILED and plain(check.name) in wanted and plain(check.name) in PLAIN
        else check
        for check in checks
    ]
    if others := [name for name in wanted if name not in PLAIN]:
        checks.append(
            Check(
                KEY,
                FAILED,
                "; ".join(
                    f"{name} cannot be accepted: it sums up other checks, or the engine refuses it "
                    "too"
                    if name in failed
                    else unknown("check", name, PLAIN)
                    for name in others
                ),
                f"Take {', '.join(others)} out of --accept and {KEY}",
                "accepted",
            )
        )
    if unneeded := [name for name in wanted if name in PLAIN and name not in failed]:
        checks.append(
            Check(
                "not needed",
                PASSED,
                f"{', '.join(unneeded)}: accepted, and has not failed",
                group="accepted",
            )
        )
    return checks
