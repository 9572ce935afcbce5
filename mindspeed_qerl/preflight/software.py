"""CANN, NNAL and the driver, and what is compiled on the machine: Megatron's dataset helpers at the
start, MindSpeed's operators at the first step (where one worker cannot, the others wait for it);
installed versions, and whether a worker could import what it imports.
"""

import re
import sys
from functools import partial

from mindspeed_qerl.ascend.contract import DISTRIBUTIONS
from mindspeed_qerl.ascend.imports import PROBE, way_out
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.emulation import CANN_VERSIONS

from .case import Case, Check, Question, failed, passed, skipped, warning
from .machine import ProbeError

# MindSpeed README.md:52 and docs/features/moe-token-permute-and-unpermute.md:22 at the pin.
# vllm-ascend asks for 8.2.RC1 (docs/source/installation.md:15), MindSpeed-RL for 8.5.0
# (docs/zh/install_guide.md:9).
LEAST_CANN = (8, 3)
SERIES = 25  # of the driver; MindSpeed-RL's guide (docs/zh/install_guide.md:29) has 25.5.0
DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
COMPILERS = (
    "make --version",
    "g++ --version",
    "python3 -m pybind11 --includes",
    "python3-config --extension-suffix",
    "ninja --version",
)
# Distributions that upstream goes with in their pinned version alone.
EXACT = ("torch", "torch_npu", "vllm")
LIMIT = 120  # seconds of a worker's imports; emulated they take 20, from a cold disk longer


def folder(case: Case, variable: str) -> Check:
    """A variable that a set_env.sh sets to its root."""
    home = case.machine.environment.get(variable)
    if not home:
        return failed(f"{variable} is not set: set_env.sh was not sourced")
    if not case.machine.glob(home):
        return failed(f"{variable}={home}: there is no such folder")
    return passed(f"{variable}={home}")


def cann_version(case: Case) -> Check:
    """Returns what torch.version.cann will say, where torch_npu reads it (utils/collect_env.py:71):
    vllm-ascend chooses code by it.
    """
    home = case.machine.environment.get("ASCEND_HOME_PATH", "/nowhere")
    files = case.machine.glob(f"{home}/ascend_*_install.info")
    files += case.machine.glob(f"{home}/*/ascend_*_install.info")
    match = re.search(r"^version=(\S+)", "\n".join(map(case.machine.read, files)), re.MULTILINE)
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


def driver(case: Case) -> Check:
    match = re.search(r"^Version=((\d+)\S*)", case.machine.read(DRIVER_INFO), re.MULTILINE)
    if not match:
        return skipped(f"no {DRIVER_INFO}")
    words = f"{match[1]}; MindSpeed-RL's guide names 25.5.0 for CANN {CANN_VERSIONS[0]}"
    if int(match[2]) < SERIES:
        return failed(f"{words}, and this is of an older series")
    return passed(words)


def compilers(case: Case) -> Check:
    """Commands that compile something in the middle of a run."""
    missing = []
    for command in COMPILERS:
        try:
            case.machine.run(command.split())
        except ProbeError as error:
            missing.append(str(error))
    if missing:
        return failed(
            f"{'; '.join(missing)}: rank 0 ends in silence where it cannot compile helpers.cpp, and "
            "the other ranks wait for it; ninja compiles MindSpeed's operators at the first step"
        )
    return passed(", ".join(COMPILERS))


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


# ---- Python ----


def version(case: Case, name: str) -> Check:
    """A distribution in its pinned version, 2.7.1.post1 and 0.11.0+empty too. Another one is a
    warning, and fails where upstream does not go with it.
    """
    pin = DISTRIBUTIONS[name]
    fix = f"pip install {name}=={pin}    # docs/ascend.md, Install"
    installed = case.machine.version(name)
    if installed is None:
        return failed(f"not installed; the pin is {pin}", fix)
    if re.fullmatch(re.escape(pin) + r"(\.post\d+)?(\+.*)?", installed):
        return passed(installed)
    words = f"{installed} is installed, the pin is {pin}"
    if name in EXACT:
        return failed(f"{words}: upstream does not go with it", fix)
    if name == "numpy" and installed.startswith("2"):
        return failed(
            f"{words}: with numpy 2 CANN's compiler ends the first set_device, "
            '"error code is 500001"',
            fix,
        )
    return warning(words, fix)


def imports(case: Case) -> Check:
    """The imports of ascend/imports.py in a process with the environment of a worker, which is the
    shell's and what the engine sets. It opens no die.
    """
    shell = case.machine.environment
    environment = {**shell, **worker_environment(case.recipe, shell)}
    try:
        output = case.machine.run([sys.executable, "-c", PROBE], LIMIT, environment)
    except ProbeError as error:  # a crash, or no answer; the last line is what was imported
        return failed(f"{error}; every worker would do the same")
    words = output.strip().splitlines()[-1]
    stopped = re.match("cannot import (.*?): ", words)
    if not stopped:
        return passed(f"{words}, with the environment of a worker")
    # vllm_ascend/utils.py:191-212: it only warns, and runs with other kernels
    verdict = warning if stopped[1] == "vllm_ascend_C" else failed
    return verdict(words, way_out(words))


CANN = [
    Question(
        "CANN's paths",
        partial(folder, variable="ASCEND_HOME_PATH"),
        "unset ASCEND_HOME_PATH && source /usr/local/Ascend/cann/set_env.sh",
        "npus_here",
    ),
    Question("CANN's version", cann_version, "docs/ascend.md, Install: CANN 8.5.0", "npus_here"),
    Question(
        "NNAL",
        partial(folder, variable="ATB_HOME_PATH"),
        "source /usr/local/Ascend/nnal/atb/set_env.sh    # docs/ascend.md, Install",
        "npus_here",
    ),
    Question("driver", driver, "Driver and firmware 25.5.0 on the host (docs/ascend.md)"),
    Question(
        "compilers",
        compilers,
        "apt install build-essential python3.11-dev\n"
        "pip install pybind11 ninja    # pybind11 for the python3 of PATH",
    ),
    Question(
        "MindSpeed's operators",
        operators,
        "rm -r FOLDER_OF_THE_LOCK\n"
        "export TORCH_EXTENSIONS_DIR=DIR    # of this machine, where programs may be run",
    ),
]
CHECKS = [
    *(Question(name, partial(version, name=name)) for name in DISTRIBUTIONS),
    Question(
        "imports of a worker",
        imports,
        "What the error asks for; after a crash or no answer:\n"
        "python -X faulthandler -c 'import torch, torch_npu, vllm'    # where it is\n"
        "A slow disk? Again: now it is in the cache",
        "npus_here",
    ),
]
