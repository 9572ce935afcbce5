"""Installed versions, upstream's sources, and whether a worker could import what it imports."""

import re
import sys
from collections.abc import Iterator

from mindspeed_qerl.ascend.contract import PINS
from mindspeed_qerl.ascend.imports import PROBE, way_out
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.preflight.case import Case, Check, failed, passed, skipped, warning
from mindspeed_qerl.preflight.machine import Machine, ProbeError

LIMIT = 120  # seconds; on emulated NPUs they take 20, from a cold disk longer
PACKAGES = """torch torch_npu vllm transformers tensordict mindspeed_rl mindspeed_llm mindspeed
megatron vllm_ascend""".split()


def pinned(
    machine: Machine,
    case: Case,
    name: str,
    pin: str,
    needed: bool = False,
    unfit: str = "",
    why: str = "",
) -> Check:
    """A distribution in its pinned version, 2.7.1.post1 and 0.11.0+empty too. Another one fails if
    the pin is `needed`, or if it begins with `unfit`, for `why`.
    """
    installed = machine.version(name)
    if installed is None:
        return failed(f"not installed; the pin is {pin}")
    if re.fullmatch(re.escape(pin) + r"(\.post\d+)?(\+.*)?", installed):
        return passed(installed)
    words = f"{installed} is installed, the pin is {pin}"
    if unfit and installed.startswith(unfit):
        return failed(f"{words}: {why}")
    if needed:
        return failed(words)
    return warning(words)


def unfit(machine: Machine, case: Case, name: str, why: str) -> Check | None:
    """A distribution that must not be there."""
    installed = machine.version(name)
    if installed is None:
        return None
    return warning(f"{installed} is installed, and {why}")


def platform(machine: Machine, case: Case) -> Check | None:
    """What a checkout on PYTHONPATH does not have, and an installed vllm-ascend does: the entry
    point by which vLLM finds its platform (vllm-ascend issues 130 and 540).
    """
    root = machine.checkout("vllm_ascend")
    if root is None or "ascend" in machine.entry_points("vllm.platform_plugins"):
        return None
    return failed(
        f"vllm-ascend in {root} is not installed: no entry point ascend of vllm.platform_plugins, "
        'so vLLM ends with "Failed to infer device type"'
    )


def compiled(machine: Machine, case: Case) -> Check | None:
    """vllm-ascend's compiled operators, without which it only warns (vllm_ascend/utils.py:191-212;
    issues 1249 and 3998).
    """
    root = machine.checkout("vllm_ascend")
    if root is None or machine.glob(f"{root}/vllm_ascend/vllm_ascend_C*.so"):
        return None
    return warning(
        f"no vllm_ascend_C*.so in {root}/vllm_ascend: it would run with other kernels than its "
        "own, and only warn"
    )


def sources(machine: Machine, case: Case) -> Iterator[Check]:
    """Which versions of upstream are here, and whether all that the engine relies on is unchanged
    in them (contract.py).
    """
    at_pin, missing = [], {pin.title for pin in PINS.values()}
    for report in machine.upstream():
        title = report.pin.title
        missing.discard(title)
        if report.at_pin:
            at_pin.append(title)
            continue
        words = str(report)
        for entry in report.changed[:3]:
            words += f"; {entry.change} {entry.file} {entry.name}".rstrip()
        fix = f"export PYTHONPATH=$PWD/{title}:$PYTHONPATH    # a checkout of {report.pin}"
        verdict = failed if report.changed else warning
        yield verdict(f"{words}; tools/check_upstream.py shows each", fix, title)
    if missing:
        yield failed(f"cannot be imported here: {', '.join(sorted(missing))}")
    elif at_pin:
        yield passed(f"{', '.join(at_pin)} as pinned")


def imports(machine: Machine, case: Case) -> Check:
    """The imports of ascend/imports.py in a process with the environment of a worker, which is the
    shell's and what the engine sets. It opens no die.
    """
    missing = [package for package in PACKAGES if not machine.importable(package)]
    if missing:
        return skipped(f"not tried: there is no {', '.join(missing)}, see above")
    environment = {**machine.environment, **worker_environment(case.recipe, machine.environment)}
    try:
        output = machine.run([sys.executable, "-c", PROBE], LIMIT, environment)
    except ProbeError as error:  # a crash, or no answer; the last line is what was imported
        return failed(f"{error}; every worker would do the same")
    words = output.strip().splitlines()[-1]
    stopped = re.match("cannot import (.*?): ", words)
    if not stopped:
        return passed(f"{words}, with the environment of a worker")
    # vllm_ascend/utils.py:191-212: it only warns, and runs with other kernels
    verdict = warning if stopped[1] == "vllm_ascend_C" else failed
    return verdict(words, way_out(words))
