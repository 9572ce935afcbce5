"""Installed versions, upstream's sources, and whether a worker could import what it imports."""

import re
import sys
from collections.abc import Iterator

from mindspeed_qerl.ascend.contract import PINS
from mindspeed_qerl.ascend.imports import PROBE, way_out
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, warning
from mindspeed_qerl.preflight.machine import ProbeError

LIMIT = 120  # seconds; on emulated NPUs they take 20, from a cold disk longer


def pinned(
    case: Case,
    name: str,
    pin: str,
    unfit: str | None = None,
    why: str = "upstream does not go with it",
) -> Check:
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


def absent(case: Case, name: str, why: str) -> Check | None:
    """A distribution that must not be there."""
    installed = case.machine.version(name)
    if installed is None:
        return None
    return warning(f"{installed} is installed, and {why}")


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
