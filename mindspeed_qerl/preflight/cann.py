"""CANN, NNAL and the driver: where they are, and which versions."""

import re
from collections.abc import Iterator

from mindspeed_qerl.ascend.imports import SOURCE
from mindspeed_qerl.emulation import CANN_VERSIONS
from mindspeed_qerl.preflight.case import (
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    needs,
    quoted,
)
from mindspeed_qerl.preflight.machine import Machine

# MindSpeed README.md:52 and docs/features/moe-token-permute-and-unpermute.md:22 at the pin.
# vllm-ascend asks for 8.2.RC1 (docs/source/installation.md:15), MindSpeed-RL for 8.5.0
# (docs/zh/install_guide.md:9).
LEAST_CANN = "8.3.RC1"
DRIVER = "25.5.0"  # of MindSpeed-RL's guide (docs/zh/install_guide.md:29), which names no least one


@needs("on_npus", "CANN's paths", "no NPU is used")
def cann(machine: Machine, case: Case) -> Iterator[Check]:
    """CANN's environment: its root, and its Python packages on the path; NNAL beside it; the driver
    below it.
    """
    home, acl = machine.environment.get("ASCEND_HOME_PATH"), machine.importable("acl")
    if not (home or acl or case.seen.any):
        yield Check("CANN's paths", SKIPPED, "no NPU here, and no CANN")
        return
    if not home:
        yield Check(
            "CANN's paths",
            FAILED,
            "ASCEND_HOME_PATH is not set: set_env.sh was not sourced",
            SOURCE,
        )
    elif not machine.glob(home):
        yield Check(
            "CANN's paths",
            FAILED,
            f"ASCEND_HOME_PATH={home}: there is no such folder",
            f"unset ASCEND_HOME_PATH && {SOURCE}",
        )
    elif not acl:
        yield Check(
            "CANN's paths",
            FAILED,
            "the module acl is not on PYTHONPATH; was it replaced, not added to?",
            f"export PYTHONPATH=$PYTHONPATH:{quoted(home)}/python/site-packages",
        )
    else:
        yield Check("CANN's paths", PASSED, f"ASCEND_HOME_PATH={home}, acl is importable")
        yield cann_version(machine, home)
    yield from kernels(machine, case)
    yield nnal(machine)
    yield driver(machine, case)


def kernels(machine: Machine, case: Case) -> Iterator[Check]:
    """CANN's operators are a package of their own, by chip (vllm-ascend issues 237 and 573). Where
    they lie is that of the releases so far, so that a place without any says nothing.
    """
    place = (
        machine.environment.get("ASCEND_OPP_PATH", "/nowhere")
        + "/built-in/op_impl/ai_core/tbe/kernel"
    )
    found = sorted(
        {
            path.rsplit("/", 1)[1]
            for path in machine.glob(f"{place}/ascend*") + machine.glob(f"{place}/config/ascend*")
        }
    )
    if not found or not isinstance(case.seen.smi, list):
        return
    chip = "ascend910_93" if any(die.chip for die in case.seen.smi) else "ascend910b"
    if any(name.startswith(chip) for name in found):
        yield Check("CANN's operators", PASSED, f"for {', '.join(found)}")
    else:
        yield Check(
            "CANN's operators",
            WARNING,
            f"for {', '.join(found)} in {place}, and the dies are {chip}: the "
            'first kernel would end with "check if the opp_kernel package is installed"',
            "bash Ascend-cann-A3-ops_8.5.0_linux-aarch64.run --install    # for a 910C; 910b-ops "
            "for a 910B",
        )


def order(version: str) -> tuple[int, ...]:
    """Of CANN's and the driver's versions: a release candidate comes before its release.

    >>> order("8.2.RC1") < order("8.3.RC1") < order("8.3.RC2") < order("8.3.0") < order("8.5.0")
    True
    """
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    rc = re.search(r"RC", version, re.IGNORECASE)
    return (*numbers[:2], -1, *numbers[2:]) if rc else tuple(numbers)


def cann_version(machine: Machine, home: str) -> Check:
    """What torch.version.cann will say, where torch_npu reads it (utils/collect_env.py:71):
    vllm-ascend chooses code by it.
    """
    files = machine.glob(f"{home}/ascend_*_install.info") + machine.glob(
        f"{home}/*/ascend_*_install.info"
    )
    texts = [machine.read(file) or "" for file in files]
    found = next(
        (match[1] for text in texts if (match := re.search(r"^version=(\S+)", text, re.MULTILINE))),
        None,
    )
    tested, fix = " and ".join(CANN_VERSIONS), f"docs/ascend.md, Install: CANN {CANN_VERSIONS[0]}"
    if found in CANN_VERSIONS:
        return Check(
            "CANN's version", PASSED, f"{found}, one that vllm-ascend was run for on emulated NPUs"
        )
    if found and order(found) < order(LEAST_CANN):
        return Check(
            "CANN's version",
            FAILED,
            f"{found}; MindSpeed at the pin is for {LEAST_CANN} (README.md:52), "
            f"MindSpeed-RL for {CANN_VERSIONS[0]}",
            fix,
        )
    return Check(
        "CANN's version",
        WARNING,
        f"{found or 'not in any ascend_*_install.info below ASCEND_HOME_PATH'}; vllm-ascend was "
        f"run for {tested} on emulated NPUs, and chooses code by this version",
        fix,
    )


def nnal(machine: Machine) -> Check:
    """The library that vllm-ascend's and MindSpeed's operators of ATB are in (MindSpeed
    op_builder/atb_builder.py).
    """
    home = machine.environment.get("ATB_HOME_PATH")
    abis = sorted(
        set(
            re.findall(
                r"nnal/atb/[^:]*(cxx_abi_\d)", machine.environment.get("LD_LIBRARY_PATH", "")
            )
        )
    )
    if (
        home and machine.glob(home) and len(abis) > 1
    ):  # by the python3 of the moment; vllm-ascend issues 1144, 3998
        return Check(
            "NNAL",
            WARNING,
            f"LD_LIBRARY_PATH has {' and '.join(abis)}: set_env.sh was sourced twice, once "
            'with another torch or none; with the wrong one libatb.so has "undefined symbol"',
            f"In a new shell, where python3 has torch: {SOURCE}",
        )
    if home and machine.glob(home):
        return Check("NNAL", PASSED, f"ATB_HOME_PATH={home}")
    found = f"ATB_HOME_PATH={home}: there is no such folder" if home else "ATB_HOME_PATH is not set"
    return Check(
        "NNAL",
        FAILED,
        f"{found}: the ATB operators that vllm-ascend and MindSpeed call are in it",
        f"source /usr/local/Ascend/nnal/atb/set_env.sh    # NNAL {CANN_VERSIONS[0]}, "
        "docs/ascend.md, Install",
    )


def driver(machine: Machine, case: Case) -> Check:
    text = machine.read("/usr/local/Ascend/driver/version.info") or ""
    told = re.search(r"^Version=(\S+)", text, re.MULTILINE)
    found = told[1] if told else case.seen.driver
    if found is None:
        return Check(
            "driver",
            SKIPPED,
            "neither /usr/local/Ascend/driver/version.info nor npu-smi says its version",
        )
    if order(found)[:1] < order(DRIVER)[:1]:
        return Check(
            "driver",
            FAILED,
            f"{found}; MindSpeed-RL's guide names {DRIVER} for CANN {CANN_VERSIONS[0]}, "
            "and this is of an older series",
            f"Driver and firmware {DRIVER} on the host (docs/ascend.md)",
        )
    return Check("driver", PASSED, f"{found}; MindSpeed-RL's guide names {DRIVER}")
