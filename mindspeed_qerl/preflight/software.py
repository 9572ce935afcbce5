"""Environment variables, installed versions, and upstream's sources."""

import re
from collections.abc import Iterable, Iterator

from mindspeed_qerl.ascend.contract import PINS
from mindspeed_qerl.ascend.limits import npu_environment
from mindspeed_qerl.common.errors import unknown
from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING, Case, Check, needs, quoted
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.preflight.network import fault_of_address, plain_address

# Variables that stop a run, or spoil it, with a value other than the engine's; the others are
# somebody's choice.
HARMFUL = {
    "VLLM_ASCEND_ENABLE_NZ": "upstream trains with 0, and later vllm-ascend refuses FRACTAL_NZ "
    "in RL",
    "VLLM_USE_V1": "upstream's workers are written for vLLM's V1 engine",
    "VLLM_VERSION": "vllm-ascend would take the code for another vLLM",
}


@needs("upstream", "variables", "the engine of NPUs sets them")
def environment(machine: Machine, case: Case) -> Iterator[Check]:
    """What the shell says otherwise than the engine: a variable that is set is left as it is
    (engine.train).
    """
    ours, shell = npu_environment(), machine.environment
    others = {name: shell[name] for name, value in ours.items() if shell.get(name, value) != value}
    yield Check(
        "variables", PASSED, f"{len(ours) - len(others)} of {len(ours)} are as the engine sets them"
    )
    for name, value in others.items():
        why = HARMFUL.get(name)
        if name == "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" and not value:
            why = "Ray would hide all but one die from a worker, and set_device(Ray's number) fails"
        if name == "PYTORCH_NPU_ALLOC_CONF":
            why = allocator_fault(value)
        yield Check(
            name,
            FAILED if why else WARNING,
            f"{value!r} in the shell, the engine would set {ours[name]!r}"
            + (f": {why}" if why else ""),
            f"unset {name}",
        )
    for name in ("VLLM_DP_SIZE", "HCCL_BUFFSIZE"):
        if name in shell:
            yield Check(
                name,
                WARNING,
                f"{shell[name]!r} in the shell is not used: the engine takes it from the config",
                f"unset {name}",
            )
    if (blocking := shell.get("ASCEND_LAUNCH_BLOCKING", "").strip()) not in ("", "0"):
        yield Check(
            "ASCEND_LAUNCH_BLOCKING",
            WARNING,
            f"{blocking!r}: every kernel is waited for, for debugging only",
            "unset ASCEND_LAUNCH_BLOCKING",
        )
    yield from leftovers(machine, case)
    if (
        case.nodes > 1 and not case.own_ray and not shell.get("HCCL_SOCKET_IFNAME")
    ):  # the launcher sets it
        yield Check(
            "HCCL_SOCKET_IFNAME",
            WARNING,
            f"not set, with {case.nodes} nodes: HCCL picks an interface by itself",
            "export HCCL_SOCKET_IFNAME=INTERFACE GLOO_SOCKET_IFNAME=INTERFACE    # the one between "
            "the nodes, on each",
        )
    if (
        case.recipe.run.wandb_project
        and not shell.get("WANDB_API_KEY")
        and shell.get("WANDB_MODE") != "offline"
    ):
        yield Check(
            "WANDB_MODE",
            WARNING,
            "run.wandb_project is set, and no WANDB_API_KEY",
            "export WANDB_MODE=offline",
        )


# What torch_npu reads of PYTORCH_NPU_ALLOC_CONF, with the values that it takes
# (NPUCachingAllocator.cpp, NPUAllocatorConfig.cpp): as written, True is neither true nor 1. Those
# of versions after the pin are among them.
ALLOCATOR = {
    **dict.fromkeys(
        (
            "expandable_segments",
            "pin_memory_expandable_segments",
            "pinned_mem_register",
            "multi_stream_lazy_reclaim",
            "release_lock_on_npumalloc",
            "pinned_use_background_threads",
        ),
        "True|False",
    ),
    **dict.fromkeys(
        (
            "segment_size_mb",
            "large_segment_size_mb",
            "pinned_reserve_segment_size_mb",
            "max_non_split_rounding_mb",
        ),
        r"\d+",
    ),
    "max_split_size_mb": r"0*(2[1-9]|[3-9]\d|[1-9]\d{2,})",
    "garbage_collection_threshold": r"0*\.0*[1-9]\d*",
    "base_addr_aligned_kb": r"\d|1[0-6]",
    "page_size": "1g",
    "per_process_memory_fraction": r"0?\.\d+|[01](\.0*)?",
    "roundup_power2_divisions": r".+",
}


def allocator_fault(text: str) -> str:
    """Why torch_npu stops at this PYTORCH_NPU_ALLOC_CONF; "" if it does not. It passes over spaces,
    wherever they are.

    >>> allocator_fault("max_split_size_mb: 256, expandable_segments: True")
    'torch_npu does not take them together'
    >>> allocator_fault("expandable_segments:true")
    "torch_npu takes no 'true' for expandable_segments, only True or False"
    """
    text = re.sub(r"\[.*?]", "[]", text.replace(" ", "")).removesuffix(",")
    given = dict(option.partition(":")[::2] for option in text.split(",")) if text else {}
    for name, value in given.items():
        if name not in ALLOCATOR:
            return unknown("option of torch_npu", name, ALLOCATOR)
        if not re.fullmatch(ALLOCATOR[name], value):
            only = ", only True or False" if ALLOCATOR[name] == "True|False" else ""
            return f"torch_npu takes no {value!r} for {name}{only}"
    if given.get("expandable_segments") == "True" and {
        "max_split_size_mb",
        "garbage_collection_threshold",
    } & {*given}:
        return "torch_npu does not take them together"  # vllm-ascend pull request 5855
    return ""


def leftovers(machine: Machine, case: Case) -> Iterator[Check]:
    """Variables of HCCL, Gloo and TensorPipe that name another machine's network, or another run's
    ranks.
    """
    shell, there = machine.environment, machine.interfaces() if case.on_npus else {}
    if not there:
        return
    names = f"here are {', '.join(sorted(there))}"
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = shell.get(variable)
        if value and not _matches(value, there, prefixes=variable.startswith("HCCL")):
            yield Check(
                variable,
                FAILED,
                f"{variable}={value}: no network interface of this machine is that; {names}",
                f"unset {variable}",
            )
    address = shell.get("HCCL_IF_IP")
    if address and plain_address(address) not in [
        each for addresses in there.values() for each in addresses
    ]:
        yield Check(
            "HCCL_IF_IP",
            FAILED,
            f"HCCL_IF_IP={address}: no network interface of this machine has it",
            "unset HCCL_IF_IP",
        )
    elif (
        address
        and case.nodes > 1
        and (fault := fault_of_address("HCCL_IF_IP", address, case.nodes))
    ):
        yield Check("HCCL_IF_IP", FAILED, fault, "unset HCCL_IF_IP")
    if table := shell.get("RANK_TABLE_FILE"):
        gone = "" if machine.read(table) is not None else ", which cannot be read"
        yield Check(
            "RANK_TABLE_FILE",
            FAILED,
            f"RANK_TABLE_FILE={table}{gone}: HCCL would take ranks and addresses "
            "from it, not from this run",
            "unset RANK_TABLE_FILE",
        )


def _matches(value: str, interfaces: Iterable[str], prefixes: bool) -> bool:
    """Whether a list of interfaces has one that is there. HCCL's are prefixes; = before them asks
    for whole names, ^ for all others (CANN, HCCL_SOCKET_IFNAME). Gloo's and TensorPipe's are whole
    names.

    >>> _matches("eth", ["eth0"], True), _matches("=eth", ["eth0"], True), _matches("^eth", ["eth0", "lo"], True)
    (True, False, True)
    """
    modes, listed = re.fullmatch(r"([\^=]*)(.*)", value).groups() if prefixes else ("=", value)
    wanted = tuple(name.strip() for name in listed.split(","))
    named = [
        name for name in interfaces if (name in wanted if "=" in modes else name.startswith(wanted))
    ]
    return len(named) < len(list(interfaces)) if "^" in modes else bool(named)


# distribution -> version, whether another is a failure: what the pinned vllm-ascend is built
# against (docs/ascend.md)
VERSIONS = {
    "torch": ("2.7.1", True),
    "torch_npu": ("2.7.1", True),
    "vllm": ("0.11.0", True),
    "ray": ("2.54.0", False),
    "transformers": ("4.57.1", False),
    "numpy": ("1.26.4", False),
    "peft": ("0.7.1", False),
    "tensordict": ("0.8.1", False),
    "hydra-core": ("1.3.2", False),
}
# distribution -> why it does not go with these
UNFIT = {
    "triton-ascend": "MindSpeed-RL does not go with it",
    # vllm-ascend Dockerfile.a3:42, modelscope/ms-swift issue 3279
    "triton": 'vLLM takes it for a GPU\'s: "0 active drivers"',
    # modelscope/ms-swift issue 6968
    "transformer-engine": "Megatron imports it, and it ends without CUDA's libraries",
}


@needs(
    "upstream",
    "packages",
    "the pins are those of the MindSpeed-RL engine; requirements/local.txt has this engine's",
)
def versions(machine: Machine, case: Case) -> Iterator[Check]:
    """Installed packages against the one set of versions that the engine was written for."""
    python = "{}.{}".format(*machine.python_version)
    if python == "3.11":
        yield Check("Python", PASSED, python)
    else:
        yield Check(
            "Python",
            FAILED,
            f"{python}; this project needs 3.11",
            "A container or environment with CPython 3.11",
        )
    right = []
    for name, (pin, needed) in VERSIONS.items():
        if name in ("torch_npu", "numpy") and not case.on_npus:
            continue
        installed = machine.version(name)
        # 2.7.1.post1 and 0.11.0+empty too
        if installed and re.fullmatch(re.escape(pin) + r"(\.post\d+)?(\+.*)?", installed):
            right.append(f"{name} {installed}")
            continue
        found = (
            f"{installed} is installed, the pin is {pin}"
            if installed
            else f"not installed; the pin is {pin}"
        )
        if two := name == "numpy" and not (installed or "1").startswith(
            "1."
        ):  # vllm-ascend issue 2210
            found += (
                ': with numpy 2 CANN\'s compiler ends the first set_device, "error code is 500001"'
            )
        yield Check(
            name,
            FAILED if needed or two or not installed else WARNING,
            found,
            f"pip install {name}=={pin}"
            if name not in ("torch", "torch_npu", "vllm")
            else f"docs/ascend.md, Install: {name} {pin}",
        )
    if right:
        yield Check("packages", PASSED, f"{', '.join(right)}, as pinned")
    for name, why in UNFIT.items():
        if (name == "triton-ascend" or case.on_npus) and (installed := machine.version(name)):
            yield Check(
                name, WARNING, f"{installed} is installed, and {why}", f"pip uninstall --yes {name}"
            )


def vllm_ascend(machine: Machine, case: Case) -> Iterator[Check]:
    """What a checkout on PYTHONPATH does not have, and an installed vllm-ascend does: the entry
    point by which vLLM finds its platform (vllm-ascend issues 130 and 540), and the compiled
    operators, without which it only warns (vllm_ascend/utils.py:191-212; issues 1249 and 3998).
    """
    root = machine.checkout("vllm_ascend")
    if not case.on_npus or root is None:
        return
    install = f"(cd {quoted(root)} && COMPILE_CUSTOM_KERNELS=1 python setup.py install)    # docs/ascend.md, Install"
    if "ascend" not in machine.entry_points("vllm.platform_plugins"):
        yield Check(
            "vLLM's platform",
            FAILED,
            f"vllm-ascend in {root} is not installed: no entry point ascend of "
            'vllm.platform_plugins, so vLLM ends with "Failed to infer device type"',
            install,
        )
    if not machine.glob(f"{root}/vllm_ascend/vllm_ascend_C*.so"):
        yield Check(
            "vllm-ascend's operators",
            WARNING,
            f"no vllm_ascend_C*.so in {root}/vllm_ascend: it would run "
            "with other kernels than its own, and only warn",
            install,
        )


@needs("upstream", "upstream's sources", "not used by this engine")
def sources(machine: Machine, case: Case) -> Iterator[Check]:
    """Which versions of upstream are here, and whether all that the engine relies on is unchanged
    in them (contract.py).
    """
    reports = machine.upstream()
    if missing := sorted(
        {pin.title for pin in PINS.values()} - {report.pin.title for report in reports}
    ):
        install = (
            "\n(cd vllm-ascend && COMPILE_CUSTOM_KERNELS=1 python setup.py install)    # vLLM "
            "registers no plugin from PYTHONPATH alone"
            if "vllm-ascend" in missing and case.on_npus
            else ""
        )
        yield Check(
            "upstream's sources",
            FAILED,
            f"cannot be imported here: {', '.join(missing)}",
            "export PYTHONPATH=$PWD/MindSpeed-RL:$PWD/MindSpeed-LLM:$PWD/MindSpeed:"
            f"$PWD/Megatron-LM:{'' if case.on_npus else '$PWD/vllm-ascend:'}$PYTHONPATH    "
            f"# where they were cloned{install}",
        )
    for report in reports:
        if report.changed or report.unused or not report.at_pin:
            first = "".join(
                f"; {each.change} {each.file} {each.name}".rstrip() for each in report.changed[:3]
            )
            fix = (
                f"(cd {quoted(report.root)} && git checkout {report.pin.commit[:7]})"
                if report.commit
                else f"export PYTHONPATH=$PWD/{report.pin.title}:$PYTHONPATH    # a checkout of "
                f"{report.pin}"
            )
            yield Check(
                report.pin.title,
                FAILED if report.changed else WARNING,
                f"{report}{first}",
                f"{fix}\npython tools/check_upstream.py    # shows each",
            )
    if not missing and (right := [report.pin.title for report in reports if report.at_pin]):
        yield Check("upstream's sources", PASSED, f"{', '.join(right)} as pinned")
