"""Variables of the shell that are somebody else's: left from a recipe, a Dockerfile or an earlier
repair. The launchers' raylet inherits the shell, so every worker has them.
"""

import re
from collections.abc import Iterator, Mapping

from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine

FAMILIES = ("HCCL_", "ASCEND_", "ATB_LLM_", "LCCL_", "OMP_", "PYTORCH_", "TORCH_", "VLLM_")
# Of these families: set by CANN's and NNAL's set_env.sh, by the launchers, or looked at by another
# check.
KNOWN = {
    "ASCEND_AICPU_PATH",
    "ASCEND_HOME_PATH",
    "ASCEND_OPP_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_ROOT",
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_RT_VISIBLE_DEVICES",
    "HCCL_BUFFSIZE",
    "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME",
    "VLLM_DP_SIZE",
}
ON = r"(?i)1|true"
# variable -> (values that do harm, whether they stop a run or make it many times slower, why)
HARMFUL = {
    # vllm-project/vllm-ascend pull request 11307; torch 2.13 on a CPU does the same
    "OMP_PROC_BIND": (
        r"(?i)(true|close|spread|master|primary).*",
        True,
        "OpenMP binds a worker, and all that it starts, to one core as soon as torch is imported",
    ),
    # vllm-ascend setup.py:393; vllm-ascend issues 130 and 540
    "VLLM_PLUGINS": (
        r"(?!(.*,)?\s*ascend\s*(,|$)).*",
        True,
        (
            "vLLM loads no other plugins, so not vllm-ascend's platform: \"Failed to infer device "
            'type"'
        ),
    ),
    # hiascend.com canncommercial 850 envref_07_0143; vllm-ascend issue 405
    "HCCL_HOST_SOCKET_PORT_RANGE": (
        r".+",
        False,
        (
            "HCCL listens there, and not from HCCL_IF_BASE_PORT on: of a guide for several runs on a "
            "die"
        ),
    ),
    "HCCL_NPU_SOCKET_PORT_RANGE": (
        r".+",
        False,
        "ports of the NPUs' own interfaces, of a guide for several nodes",
    ),
    # vllm-ascend issues 7711 and 14506
    "HCCL_INTRA_ROCE_ENABLE": (
        ON,
        False,
        "traffic inside this machine leaves HCCS for the NPUs' network ports",
    ),
    "HCCL_INTRA_PCIE_ENABLE": (ON, False, "traffic inside this machine leaves HCCS for PCIe"),
    "HCCL_INTER_HCCS_DISABLE": (ON, False, "traffic leaves HCCS for the NPUs' network ports"),
    # vllm-ascend issue 1440
    "TORCH_DEVICE_BACKEND_AUTOLOAD": (
        "0",
        False,
        "torch has no torch.npu until torch_npu is imported by name",
    ),
    # ray-project/ray issues 14350 and 37757
    "RAY_grpc_enable_http_proxy": (
        ON,
        False,
        "Ray's processes look for each other through http_proxy",
    ),
}


def variables(machine: Machine, case: Case) -> Iterator[Check]:
    """Those that are known to do harm, each with its thread, and the names of the others in one
    line.
    """
    if not case.on_npus:
        return
    shell = machine.environment
    found = list(_harmful(shell, case))
    yield from found
    known = KNOWN | npu_environment().keys() | {check.name for check in found}
    others = sorted(name for name in shell if name.startswith(FAMILIES) and name not in known)
    unset = "neither the engine nor set_env.sh sets"
    yield Check(
        "other variables",
        PASSED,
        f"{', '.join(others)}: {unset} them, and the workers have them"
        if others
        else f"none of {', '.join(f'{family}*' for family in FAMILIES)} that {unset}",
    )


def _harmful(shell: Mapping[str, str], case: Case) -> Iterator[Check]:
    layout, plan = case.recipe.layout, case.plan
    mode = shell.get("HCCL_OP_EXPANSION_MODE", "").strip()
    if mode.upper().startswith("AIV"):
        # vllm-ascend issues 14928 (A3, eager: hangs in profile_run), 13688 and 3881; its docs
        # dropped it (pull 5419)
        experts = (
            plan is not None
            and plan.shape.moe
            and layout.enable_expert_parallel
            and layout.infer_ep > 1
        )
        yield Check(
            "HCCL_OP_EXPANSION_MODE",
            FAILED if experts else WARNING,
            f"{mode!r} in the shell: HCCL takes the vector cores"
            + (
                f", which the dispatch of experts (vLLM's EP {layout.infer_ep}) waits for: vLLM "
                "was seen to hang in its profile run (107020)"
                if experts
                else "; with experts vLLM was seen to hang"
            ),
            "unset HCCL_OP_EXPANSION_MODE",
        )
    for name, (values, stops, why) in HARMFUL.items():
        if name in shell and re.fullmatch(values, shell[name].strip()):
            yield Check(
                name,
                FAILED if stops else WARNING,
                f"{shell[name]!r} in the shell: {why}",
                f"unset {name}",
            )
