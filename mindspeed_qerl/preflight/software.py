"""Environment variables, installed versions, and upstream's sources."""

import re
from collections.abc import Iterator

from mindspeed_qerl.ascend.contract import PINS
from mindspeed_qerl.ascend.settings import npu_environment
from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING, Case, Check, needs
from mindspeed_qerl.preflight.machine import Machine

# Variables that stop a run, or spoil it, with a value other than the engine's; the others are somebody's choice.
HARMFUL = {
    "VLLM_ASCEND_ENABLE_NZ": "upstream trains with 0, and later vllm-ascend refuses FRACTAL_NZ in RL",
    "VLLM_USE_V1": "upstream's workers are written for vLLM's V1 engine",
    "VLLM_VERSION": "vllm-ascend would take the code for another vLLM",
}


@needs("upstream", "variables", "the engine of NPUs sets them")
def environment(machine: Machine, case: Case) -> Iterator[Check]:
    """What the shell says otherwise than the engine: a variable that is set is left as it is (engine.train)."""
    ours, shell = npu_environment(), machine.environment
    others = {name: shell[name] for name, value in ours.items() if shell.get(name, value) != value}
    yield Check("variables", PASSED, f"{len(ours) - len(others)} of {len(ours)} are as the engine sets them")
    for name, value in others.items():
        why = HARMFUL.get(name)
        if name == "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" and not value:
            why = "Ray would hide all but one die from a worker, and set_device(Ray's number) fails"
        yield Check(name, FAILED if why else WARNING, f"{value!r} in the shell, the engine would set {ours[name]!r}"
                    + (f": {why}" if why else ""), f"unset {name}")
    for name in ("VLLM_DP_SIZE", "HCCL_BUFFSIZE"):
        if name in shell:
            yield Check(name, WARNING, f"{shell[name]!r} in the shell is not used: the engine takes it from the "
                        "config", f"unset {name}")
    if (blocking := shell.get("ASCEND_LAUNCH_BLOCKING", "0")) != "0":
        yield Check("ASCEND_LAUNCH_BLOCKING", WARNING, f"{blocking!r}: every kernel is waited for, for debugging only",
                    "unset ASCEND_LAUNCH_BLOCKING")
    if case.nodes > 1 and not shell.get("HCCL_SOCKET_IFNAME"):
        yield Check("HCCL_SOCKET_IFNAME", WARNING, f"not set, with {case.nodes} nodes: HCCL picks an interface by "
                    "itself", "export HCCL_SOCKET_IFNAME=INTERFACE GLOO_SOCKET_IFNAME=INTERFACE    # the one between "
                    "the nodes, on each")
    if case.recipe.run.wandb_project and not shell.get("WANDB_API_KEY") and shell.get("WANDB_MODE") != "offline":
        yield Check("WANDB_MODE", WARNING, "run.wandb_project is set, and no WANDB_API_KEY",
                    "export WANDB_MODE=offline")


# distribution -> version, whether another is a failure: what the pinned vllm-ascend is built against (docs/ascend.md)
VERSIONS = {
    "torch": ("2.7.1", True), "torch_npu": ("2.7.1", True), "vllm": ("0.11.0", True), "ray": ("2.54.0", False),
    "transformers": ("4.57.1", False), "peft": ("0.7.1", False), "tensordict": ("0.8.1", False),
    "hydra-core": ("1.3.2", False)}


@needs("upstream", "packages",
       "the pins are those of the MindSpeed-RL engine; requirements/local.txt has this engine's")
def versions(machine: Machine, case: Case) -> Iterator[Check]:
    """Installed packages against the one set of versions that the engine was written for."""
    python = "{}.{}".format(*machine.python_version)
    if python == "3.11":
        yield Check("Python", PASSED, python)
    else:
        yield Check("Python", FAILED, f"{python}; this project needs 3.11",
                    "A container or environment with CPython 3.11")
    right = []
    for name, (pin, needed) in VERSIONS.items():
        if name == "torch_npu" and not case.on_npus:
            continue
        installed = machine.version(name)
        # 2.7.1.post1 and 0.11.0+empty too
        if installed and re.fullmatch(re.escape(pin) + r"(\.post\d+)?(\+.*)?", installed):
            right.append(f"{name} {installed}")
            continue
        found = f"{installed} is installed, the pin is {pin}" if installed else f"not installed; the pin is {pin}"
        yield Check(name, FAILED if needed or not installed else WARNING, found,
                    f"pip install {name}=={pin}" if name not in ("torch", "torch_npu", "vllm")
                    else f"docs/ascend.md, Install: {name} {pin}")
    if right:
        yield Check("packages", PASSED, f"{', '.join(right)}, as pinned")
    if triton := machine.version("triton-ascend"):
        yield Check("triton-ascend", WARNING, f"{triton} is installed, and MindSpeed-RL does not go with it",
                    "pip uninstall --yes triton-ascend")


@needs("upstream", "upstream's sources", "not used by this engine")
def sources(machine: Machine, case: Case) -> Iterator[Check]:
    """Which versions of upstream are here, and whether all that the engine relies on is unchanged in them
    (contract.py)."""
    reports = machine.upstream()
    if missing := sorted({pin.title for pin in PINS.values()} - {report.pin.title for report in reports}):
        yield Check("upstream's sources", FAILED, f"cannot be imported here: {', '.join(missing)}",
                    "export PYTHONPATH=$PWD/MindSpeed-RL:$PWD/MindSpeed-LLM:$PWD/MindSpeed:$PWD/Megatron-LM:"
                    "$PWD/vllm-ascend:$PYTHONPATH    # where they were cloned")
    for report in reports:
        if report.changed or report.unused or not report.at_pin:
            first = "".join(f"; {each.change} {each.file} {each.name}".rstrip() for each in report.changed[:3])
            fix = f"(cd {report.root} && git checkout {report.pin.commit[:7]})" if report.commit else \
                f"export PYTHONPATH=$PWD/{report.pin.title}:$PYTHONPATH    # a checkout of {report.pin}"
            yield Check(report.pin.title, FAILED if report.changed else WARNING, f"{report}{first}",
                        f"{fix}\npython tools/check_upstream.py    # shows each")
    if not missing and (right := [report.pin.title for report in reports if report.at_pin]):
        yield Check("upstream's sources", PASSED, f"{', '.join(right)} as pinned")
