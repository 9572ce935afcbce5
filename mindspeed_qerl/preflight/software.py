"""Installed versions, upstream's sources, and whether a worker could import what it imports."""

import re
import sys
from collections.abc import Iterator
from functools import partial

from mindspeed_qerl.ascend.contract import PINS
from mindspeed_qerl.ascend.imports import PROBE, way_out
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.preflight.case import Case, Check, Question, failed, passed, warning
from mindspeed_qerl.preflight.machine import ProbeError

LIMIT = 120  # seconds; on emulated NPUs they take 20, from a cold disk longer


def version(case: Case, name: str, pin: str, unfit: str | None, why: str) -> Check:
    """A distribution in its pinned version, 2.7.1.post1 and 0.11.0+empty too. Another one fails if
    it begins with `unfit`, for `why`, and else is a warning.
    """
    installed = case.machine.version(name)
    if installed is None:
        return failed(f"not installed; the pin is {pin}")
    if re.fullmatch(re.escape(pin) + r"(\.post\d+)?(\+.*)?", installed):
        return passed(installed)
    words = f"{installed} is installed, the pin is {pin}"
    if unfit is not None and installed.startswith(unfit):
        return failed(f"{words}: {why}")
    return warning(words)


def pinned(
    name: str,
    pin: str,
    unfit: str | None = None,
    why: str = "upstream does not go with it",
    needs: str = "upstream",
) -> Question:
    """Asks for a distribution that has a pin (`version`)."""
    verdict = partial(version, name=name, pin=pin, unfit=unfit, why=why)
    fix = f"pip install {name}=={pin}    # docs/ascend.md, Install"
    return Question(name, f"Is it {pin}?", verdict, fix, needs)


def absent(name: str, why: str, needs: str = "on_npus") -> Question:
    """Asks for a distribution that must not be there."""

    def verdict(case: Case) -> Check | None:
        installed = case.machine.version(name)
        return warning(f"{installed} is installed, and {why}") if installed else None

    return Question(
        name, f"Is it absent? Else {why}.", verdict, f"pip uninstall --yes {name}", needs
    )


def sources(case: Case) -> Iterator[Check]:
    """Which versions of upstream are here, and whether all that the engine relies on is unchanged
    in them (contract.py).
    """
    missing = {pin.title for pin in PINS.values()}
    for report in case.machine.upstream():
        title = report.pin.title
        missing.discard(title)
        verdict = passed
        if report.changed:
            verdict = failed
        elif not report.at_pin:
            verdict = warning
        yield verdict(str(report), name=title)
    if missing:
        yield failed(f"cannot be imported here: {', '.join(sorted(missing))}")


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


ROWS = [
    pinned("torch", "2.7.1", unfit=""),
    pinned("torch_npu", "2.7.1", unfit="", needs="on_npus"),
    pinned("vllm", "0.11.0", unfit=""),
    pinned("ray", "2.53.0"),
    pinned("transformers", "4.57.1"),
    pinned(
        "numpy",
        "1.26.4",
        unfit="2",
        why='with numpy 2 CANN\'s compiler ends the first set_device, "error code is 500001"',
        needs="on_npus",
    ),
    pinned("peft", "0.7.1"),
    pinned("tensordict", "0.8.1"),
    pinned("hydra-core", "1.3.2"),
    absent("triton-ascend", "MindSpeed-RL does not go with it", "upstream"),
    absent("triton", 'vLLM takes it for a GPU\'s: "0 active drivers"'),
    absent("transformer-engine", "Megatron imports it, and it ends without CUDA's libraries"),
    Question(
        "upstream's sources",
        "Are all five repositories here, and unchanged where the engine relies on them?",
        sources,
        "export "
        "PYTHONPATH=$PWD/MindSpeed-RL:$PWD/MindSpeed-LLM:$PWD/MindSpeed:$PWD/Megatron-LM:$PYT"
        "HONPATH    # where they were cloned\n"
        "git checkout PIN    # python tools/check_upstream.py has each pin, and what changed",
        "upstream",
        refused=True,
    ),
    Question(
        "imports of a worker",
        "Can a process with a worker's environment import what a worker imports?",
        imports,
        "What the error asks for; after a crash or no answer:\n"
        "python -X faulthandler -c 'import torch, torch_npu, vllm'    # where it is\n"
        "A slow disk? Again: now it is in the cache",
        "npus_here",
    ),
]
