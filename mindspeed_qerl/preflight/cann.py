"""CANN, NNAL and the driver, and what is compiled on the machine: Megatron's dataset helpers at the
start, MindSpeed's operators at the first step. Where one worker cannot, the others wait for it.
"""

import re
import sysconfig
from pathlib import Path

from mindspeed_qerl.emulation import CANN_VERSIONS
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, skipped, warning
from mindspeed_qerl.preflight.machine import Machine, ProbeError

# MindSpeed README.md:52 and docs/features/moe-token-permute-and-unpermute.md:22 at the pin.
# vllm-ascend asks for 8.2.RC1 (docs/source/installation.md:15), MindSpeed-RL for 8.5.0
# (docs/zh/install_guide.md:9).
LEAST_CANN = "8.3.RC1"
DRIVER = "25.5.0"  # of MindSpeed-RL's guide (docs/zh/install_guide.md:29), which names no least one
DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
# What Megatron's Makefile calls, and where Python's headers are
COMPILING = (
    "g++ --version",
    "python3 -m pybind11 --includes",
    "python3-config --extension-suffix",
)


def order(version: str) -> tuple[int, ...]:
    """Of CANN's and the driver's versions: a release candidate comes before its release.

    >>> order("8.2.RC1") < order("8.3.RC1") < order("8.3.RC2") < order("8.3.0") < order("8.5.0")
    True
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    if "RC" in version.upper():
        return (*numbers[:2], -1, *numbers[2:])
    return tuple(numbers)


def folder(machine: Machine, case: Case, name: str, variable: str) -> Check:
    """A variable that a set_env.sh sets to its root."""
    home = machine.environment.get(variable)
    if not home:
        return failed(f"{variable} is not set: set_env.sh was not sourced")
    if not machine.glob(home):
        return failed(f"{variable}={home}: there is no such folder")
    return passed(f"{variable}={home}")


def packages(machine: Machine, case: Case) -> Check:
    if machine.importable("acl"):
        return passed("acl is importable")
    return failed("the module acl is not on PYTHONPATH; was it replaced, not added to?")


def version(machine: Machine, case: Case) -> Check | None:
    """What torch.version.cann will say, where torch_npu reads it (utils/collect_env.py:71):
    vllm-ascend chooses code by it.
    """
    home = machine.environment.get("ASCEND_HOME_PATH", "/nowhere")
    if not machine.glob(home):
        return None
    files = machine.glob(f"{home}/ascend_*_install.info")
    files += machine.glob(f"{home}/*/ascend_*_install.info")
    text = "\n".join(machine.read(file) or "" for file in files)
    match = re.search(r"^version=(\S+)", text, re.MULTILINE)
    if not match:
        return warning(f"in no ascend_*_install.info below {home}")
    number = match[1]
    if number in CANN_VERSIONS:
        return passed(f"{number}, one that vllm-ascend was run for on emulated NPUs")
    if order(number) < order(LEAST_CANN):
        return failed(
            f"{number}; MindSpeed at the pin is for {LEAST_CANN} (README.md:52), MindSpeed-RL for "
            f"{CANN_VERSIONS[0]}"
        )
    tested = " and ".join(CANN_VERSIONS)
    return warning(
        f"{number}; vllm-ascend was run for {tested} on emulated NPUs, and chooses code by it"
    )


def kernels(machine: Machine, case: Case) -> Check | None:
    """CANN's operators are a package of their own, by chip (vllm-ascend issues 237 and 573). Where
    they lie is that of the releases so far, so that a place without any says nothing.
    """
    place = machine.environment.get("ASCEND_OPP_PATH", "/nowhere")
    place += "/built-in/op_impl/ai_core/tbe/kernel"
    folders = machine.glob(f"{place}/ascend*") + machine.glob(f"{place}/config/ascend*")
    chips = sorted({Path(folder).name for folder in folders})
    if not chips or not case.seen.dies:
        return None
    chip = "ascend910_93" if any(die.chip for die in case.seen.dies) else "ascend910b"
    if any(name.startswith(chip) for name in chips):
        return passed(f"for {', '.join(chips)}")
    return warning(
        f"for {', '.join(chips)} in {place}, and the dies are {chip}: the first kernel would end "
        'with "check if the opp_kernel package is installed"'
    )


def abis(machine: Machine, case: Case) -> Check | None:
    """NNAL's libraries are for one C++ ABI, chosen by the python3 of the moment (vllm-ascend issues
    1144 and 3998).
    """
    libraries = machine.environment.get("LD_LIBRARY_PATH", "")
    kinds = sorted(set(re.findall(r"nnal/atb/[^:]*(cxx_abi_\d)", libraries)))
    if len(kinds) < 2:
        return None
    return warning(
        f"LD_LIBRARY_PATH has {' and '.join(kinds)}: set_env.sh was sourced twice, once with "
        'another torch or none; with the wrong one libatb.so has "undefined symbol"'
    )


def driver(machine: Machine, case: Case) -> Check:
    match = re.search(r"^Version=(\S+)", machine.read(DRIVER_INFO) or "", re.MULTILINE)
    number = match and match[1] or case.seen.driver
    if not number:
        return skipped(f"neither {DRIVER_INFO} nor npu-smi says its version")
    words = f"{number}; MindSpeed-RL's guide names {DRIVER} for CANN {CANN_VERSIONS[0]}"
    if order(number)[:1] < order(DRIVER)[:1]:
        return failed(f"{words}, and this is of an older series")
    return passed(words)


def helpers(machine: Machine, case: Case) -> Check | None:
    """megatron/core/datasets/helpers.cpp, which rank 0 gives to `make` in every run (MindSpeed-RL
    cli/train_grpo.py:594, megatron/core/datasets/utils.py:compile_helpers): it leaves with exit
    status 1 if that fails, and says so in its own log only (NVIDIA-NeMo/RL issue 3109,
    NVIDIA/Megatron-LM issues 143 and 807). The Makefile asks the python3 and python3-config of
    PATH; what `make -n` prints is what would be done.
    """
    folder = f"{machine.checkout('megatron')}/megatron/core/datasets"
    if not machine.glob(f"{folder}/Makefile"):
        return None
    missing, plan = [], ""
    try:
        plan = machine.run(["make", "-n", "-C", folder])
    except ProbeError as error:
        missing.append(str(error))
    made = f"helpers_cpp{SUFFIX}"
    if " -o helpers_cpp" in plan:
        if f" -o {made}" not in plan and not machine.glob(f"{folder}/{made}"):
            missing.append(f"python3-config of PATH is another Python's: it is not for {made}")
        for command in COMPILING:
            try:
                machine.run(command.split())
            except ProbeError as error:
                missing.append(str(error))
        if not machine.writable(folder):
            missing.append(f"{folder} cannot be written")
    if not missing:
        return passed("helpers.cpp is compiled, or can be")
    return failed(
        f"{'; '.join(missing)}: rank 0 compiles helpers.cpp, ends when it cannot, and the other "
        "ranks wait for it"
    )


def operators(machine: Machine, case: Case) -> Check:
    """MindSpeed's own operators, such as the grouped product of experts (op_builder/builder.py):
    torch builds them with ninja in TORCH_EXTENSIONS_DIR. A build that was killed leaves <name>/lock
    there, for which everybody waits for ever (MindSpeed docs/faq/torch_extensions.md); its
    delete_lock_file looks one folder above (megatron_adaptor.py:44).
    """
    shell = machine.environment
    cache = shell.get("XDG_CACHE_HOME") or f"{shell.get('HOME', '/root')}/.cache"
    # torch/utils/cpp_extension.py:_get_build_directory
    root = shell.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    builds = root
    if not shell.get("TORCH_EXTENSIONS_DIR"):
        builds += f"/py{''.join(map(str, machine.python_version))}_*"
    try:
        machine.run(["ninja", "--version"])
    except ProbeError as error:
        verdict = failed if case.plan and case.plan.shape.moe else warning
        return verdict(f"{error}: torch compiles them with it, at the first step")
    locks = machine.glob(f"{builds}/*/lock")
    if locks:
        words = f"{', '.join(locks)}: every worker waits for it, for ever"
        if machine.processes("ninja"):
            return warning(f"{words}; somebody compiles now, or was killed")
        return failed(f"{words}; left by a build that was killed")
    if not machine.writable(root):
        return failed(f"{root} cannot be written: they are compiled there at the first step")
    if not machine.may_execute(root):  # vllm-ascend issue 10551, pytorch/pytorch issue 91005
        return failed(
            f'{root} is mounted noexec: what is compiled there cannot be loaded ("failed to map '
            'segment from shared object")'
        )
    return passed(f"ninja, and {root}, can be used, and no lock is left there")
