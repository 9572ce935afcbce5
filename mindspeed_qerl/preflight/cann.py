"""CANN, NNAL and the driver, and what is compiled on the machine: Megatron's dataset helpers at the
start, MindSpeed's operators at the first step. Where one worker cannot, the others wait for it.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mindspeed_qerl.emulation import CANN_VERSIONS
from mindspeed_qerl.preflight.case import Case, Check, Question, failed, passed, skipped, warning
from mindspeed_qerl.preflight.machine import ProbeError

# MindSpeed README.md:52 and docs/features/moe-token-permute-and-unpermute.md:22 at the pin.
# vllm-ascend asks for 8.2.RC1 (docs/source/installation.md:15), MindSpeed-RL for 8.5.0
# (docs/zh/install_guide.md:9).
LEAST_CANN = (8, 3)
SERIES = 25  # of the driver; MindSpeed-RL's guide (docs/zh/install_guide.md:29) has 25.5.0
DRIVER_INFO = "/usr/local/Ascend/driver/version.info"


def folder(case: Case, variable: str) -> Check:
    """A variable that a set_env.sh sets to its root."""
    home = case.machine.environment.get(variable)
    if not home:
        return failed(f"{variable} is not set: set_env.sh was not sourced")
    if not case.machine.glob(home):
        return failed(f"{variable}={home}: there is no such folder")
    return passed(f"{variable}={home}")


def version(case: Case) -> Check:
    """Returns what torch.version.cann will say, where torch_npu reads it (utils/collect_env.py:71):
    vllm-ascend chooses code by it.
    """
    home = case.machine.environment.get("ASCEND_HOME_PATH", "/nowhere")
    files = case.machine.glob(f"{home}/ascend_*_install.info")
    files += case.machine.glob(f"{home}/*/ascend_*_install.info")
    text = "\n".join(map(case.machine.read, files))
    match = re.search(r"^version=(\S+)", text, re.MULTILINE)
    if not match:
        return warning(f"in no ascend_*_install.info below {home}")
    number = match[1]
    tested = " and ".join(CANN_VERSIONS)
    if number in CANN_VERSIONS:
        return passed(f"{number}, one that vllm-ascend was run for on emulated NPUs")
    words = f"{number}; vllm-ascend was run for {tested} on emulated NPUs, and chooses code by it"
    if tuple(map(int, re.findall(r"\d+", number)[:2])) < LEAST_CANN:
        return failed(f"{words}; MindSpeed at the pin is for 8.3.RC1 (README.md:52)")
    return warning(words)


def kernels(case: Case) -> Check | None:
    """CANN's operators are a package of their own, by chip (vllm-ascend issues 237 and 573). Where
    they lie is that of the releases so far, so that a place without any says nothing.
    """
    place = case.machine.environment.get("ASCEND_OPP_PATH", "/nowhere")
    place += "/built-in/op_impl/ai_core/tbe/kernel"
    folders = case.machine.glob(f"{place}/ascend*") + case.machine.glob(f"{place}/config/ascend*")
    chips = sorted({Path(folder).name for folder in folders})
    two_chips = any(die.chip for die in case.seen.dies)  # a card of a 910C
    chip = "ascend910_93" if two_chips else "ascend910b"
    if not chips or not case.seen.dies or any(name.startswith(chip) for name in chips):
        return None
    return warning(
        f"for {', '.join(chips)} in {place}, and the dies are {chip}: the first kernel would end "
        'with "check if the opp_kernel package is installed"'
    )


def driver(case: Case) -> Check:
    match = re.search(r"^Version=((\d+)\S*)", case.machine.read(DRIVER_INFO), re.MULTILINE)
    if not match:
        return skipped(f"no {DRIVER_INFO}")
    words = f"{match[1]}; MindSpeed-RL's guide names 25.5.0 for CANN {CANN_VERSIONS[0]}"
    if int(match[2]) < SERIES:
        return failed(f"{words}, and this is of an older series")
    return passed(words)


def commands(case: Case, needed: Sequence[str], why: str) -> Check:
    """Commands that compile something in the middle of a run."""
    missing = []
    for command in needed:
        try:
            case.machine.run(command.split())
        except ProbeError as error:
            missing.append(str(error))
    if missing:
        return failed(f"{'; '.join(missing)}: {why}")
    return passed(", ".join(needed))


def operators(case: Case) -> Check:
    """MindSpeed's own operators, such as the grouped product of experts (op_builder/builder.py):
    torch builds them with ninja in TORCH_EXTENSIONS_DIR. A build that was killed leaves <name>/lock
    there, for which everybody waits for ever (MindSpeed docs/faq/torch_extensions.md); its
    delete_lock_file looks one folder above (megatron_adaptor.py:44).
    """
    shell = case.machine.environment
    # torch/utils/cpp_extension.py:_get_build_directory
    root = shell.get("TORCH_EXTENSIONS_DIR")
    locks = f"{root}/*/lock"
    if not root:
        root = f"{shell.get('HOME', '/root')}/.cache/torch_extensions"
        locks = f"{root}/*/*/lock"
    left = case.machine.glob(locks)
    if left:
        return failed(
            f"{', '.join(left)}: every worker waits for it, for ever; left by a build that was "
            "killed, unless one is compiling now"
        )
    if not case.machine.writable(root):
        return failed(f"{root} cannot be written: they are compiled there at the first step")
    if not case.machine.may_execute(root):  # vllm-ascend issue 10551, pytorch/pytorch issue 91005
        return failed(
            f'{root} is mounted noexec: what is compiled there cannot be loaded ("failed to map '
            'segment from shared object")'
        )
    return passed(f"can be compiled in {root}")


ROWS = [
    Question(
        "CANN's paths",
        "Was CANN's set_env.sh sourced?",
        partial(folder, variable="ASCEND_HOME_PATH"),
        "unset ASCEND_HOME_PATH && source /usr/local/Ascend/cann/set_env.sh",
        "npus_here",
    ),
    Question(
        "CANN's version",
        "Is CANN one that MindSpeed and vllm-ascend are for?",
        version,
        "docs/ascend.md, Install: CANN 8.5.0",
        "npus_here",
    ),
    Question(
        "CANN's operators",
        "Are CANN's operators those of this chip?",
        kernels,
        "bash Ascend-cann-A3-ops_8.5.0_linux-aarch64.run --install    # for a 910C; 910b-ops "
        "for a 910B",
        "on_npus",
    ),
    Question(
        "NNAL",
        "Was NNAL's set_env.sh sourced?",
        partial(folder, variable="ATB_HOME_PATH"),
        "source /usr/local/Ascend/nnal/atb/set_env.sh    # docs/ascend.md, Install",
        "npus_here",
    ),
    Question(
        "driver",
        "Is the driver of the series 25?",
        driver,
        "Driver and firmware 25.5.0 on the host (docs/ascend.md)",
        "on_npus",
    ),
    Question(
        "Megatron's helpers",
        "Can rank 0 compile Megatron's helpers.cpp?",
        partial(
            commands,
            needed=[
                "make --version",
                "g++ --version",
                "python3 -m pybind11 --includes",
                "python3-config --extension-suffix",
            ],
            why="rank 0 ends in silence where it cannot compile helpers.cpp, and the other ranks "
            "wait for it",
        ),
        "apt install build-essential python3.11-dev\n"
        "pip install pybind11    # for the python3 of PATH",
        "on_npus",
    ),
    Question(
        "ninja",
        "Is there ninja?",
        partial(
            commands,
            needed=["ninja --version"],
            why="torch compiles MindSpeed's operators with it, at the first step",
        ),
        "pip install ninja",
        "on_npus",
    ),
    Question(
        "MindSpeed's operators",
        "Can torch compile and load operators, and is no lock of a killed build left?",
        operators,
        "rm -r FOLDER_OF_THE_LOCK\n"
        "export TORCH_EXTENSIONS_DIR=DIR    # of this machine, where programs may be run",
        "on_npus",
    ),
]
