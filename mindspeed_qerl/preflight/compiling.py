"""What upstream compiles on the machine, and whether it can: Megatron's dataset helpers at the
start, MindSpeed's operators at the first step. Where one worker cannot, the others wait for it.
"""

import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine, ProbeError

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def helpers(machine: Machine, case: Case) -> Iterator[Check]:
    """megatron/core/datasets/helpers.cpp, which rank 0 gives to `make` in every run (MindSpeed-RL
    cli/train_grpo.py:594, megatron/core/datasets/utils.py:compile_helpers): it leaves with exit
    status 1 if that fails, and says so in its own log only (NVIDIA-NeMo/RL issue 3109,
    NVIDIA/Megatron-LM issues 143 and 807). The Makefile asks the python3 and python3-config of
    PATH; what `make -n` prints is what would be done.
    """
    folder = f"{machine.checkout('megatron')}/megatron/core/datasets"
    if not case.on_npus or not machine.glob(f"{folder}/Makefile"):
        return
    missing = list(_missing(machine, folder))
    if not missing:
        yield Check("Megatron's helpers", PASSED, f"helpers_cpp{SUFFIX} is compiled, or can be")
        return
    yield Check(
        "Megatron's helpers",
        FAILED,
        f"{'; '.join(missing)}: rank 0 compiles helpers.cpp, ends when it "
        "cannot, and the other ranks wait for it",
        "apt install build-essential python3.11-dev\n"
        "pip install pybind11    # for the python3 of PATH\n"
        f"make -C {folder}    # once; a file that is newer than helpers.cpp stays",
    )


def _missing(machine: Machine, folder: str) -> Iterator[str]:
    try:
        plan = machine.run(["make", "-n", "-C", folder])
    except ProbeError as error:
        yield str(error)
        return
    line = next((line for line in plan.splitlines() if " -o helpers_cpp" in line), "")
    made = f"helpers_cpp{SUFFIX}"
    if not line:
        return
    words = shlex.split(line)
    if words[-1] != made and not machine.glob(f"{folder}/{made}"):
        yield f"python3-config of PATH is missing or another Python's: {words[-1]} in place of {made}"
    try:
        machine.run([words[0], "--version"])
    except ProbeError as error:
        yield str(error)
    included = [word[2:] for word in words if word.startswith("-I")]
    for header, where in (
        ("pybind11/pybind11.h", "pybind11 of the python3 of PATH"),
        ("Python.h", "python3.11-dev"),
    ):
        if not any(machine.glob(f"{place}/{header}") for place in included):
            yield f"no {header} ({where})"
    if not machine.writable(folder):
        yield f"{folder} cannot be written"


def operators(machine: Machine, case: Case) -> Iterator[Check]:
    """MindSpeed's own operators, such as the grouped product of experts (op_builder/builder.py):
    torch builds them with ninja in TORCH_EXTENSIONS_DIR. A build that was killed leaves <name>/lock
    there, for which everybody waits for ever (MindSpeed docs/faq/torch_extensions.md); its
    delete_lock_file looks one folder above (megatron_adaptor.py:44).
    """
    if not case.on_npus:
        return
    shell = machine.environment
    given = shell.get("TORCH_EXTENSIONS_DIR")
    cache = shell.get("XDG_CACHE_HOME") or str(Path(shell.get("HOME", "/root")) / ".cache")
    root = given or f"{cache}/torch_extensions"  # torch/utils/cpp_extension.py:_get_build_directory
    builds = root if given else f"{root}/py{''.join(map(str, machine.python_version))}_*"
    elsewhere = "export TORCH_EXTENSIONS_DIR=DIR    # of this machine, where programs may be run"
    name = "MindSpeed's operators"
    try:
        machine.run(["ninja", "--version"])
    except ProbeError as error:
        yield Check(
            name,
            FAILED if case.plan and case.plan.shape.moe else WARNING,
            f"{error}: torch compiles them with it, at the first step",
            "pip install ninja",
        )
        return
    if locks := machine.glob(f"{builds}/*/lock"):
        state, whose = (
            (WARNING, "somebody compiles now, or was killed")
            if machine.processes("ninja")
            else (FAILED, "left by a build that was killed")
        )
        yield Check(
            name,
            state,
            f"{', '.join(locks)}: {whose}; every worker waits for it, for ever",
            f"rm -r {shlex.join(str(Path(lock).parent) for lock in locks)}",
        )
    elif not machine.writable(root):
        yield Check(
            name,
            FAILED,
            f"{root} cannot be written: they are compiled there at the first step",
            elsewhere,
        )
    elif not machine.may_execute(root):  # vllm-ascend issue 10551, pytorch/pytorch issue 91005
        yield Check(
            name,
            FAILED,
            f'{root} is mounted noexec: what is compiled there cannot be loaded ("failed to '
            'map segment from shared object")',
            elsewhere,
        )
    else:
        yield Check(name, PASSED, f"ninja, and {root}, can be used, and no lock is left there")
