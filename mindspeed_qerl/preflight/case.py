"""One line of the table, what is to be launched, and the NPUs that the machine sees."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mindspeed_qerl.ascend.resume import conversion_command
from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS
from mindspeed_qerl.recipe.types import Recipe

from .machine import Machine, ProbeError

PASSED = "passed"
WARNING = "warning"
FAILED = "failed"
SKIPPED = "skipped"
ACCEPTED = "accepted"
LIST = "ASCEND_RT_VISIBLE_DEVICES"
# Words of npu-smi for the health of a die that works; Warning is a minor alarm.
WORKING = ("OK", "Warning")
# Faults of these rules leave a default in place of the value (recipe/reader.py).
UNREAD = ("value", "unknown", "missing")


@dataclass(frozen=True)
class Check:
    """One line of the table. `fix` is what to do about it, commands as they are typed; "" stands
    for that of the check's row. `name` is the row's, unless the row has several lines.
    """

    state: str
    found: str
    fix: str = ""
    name: str = ""
    group: str = ""


passed = partial(Check, PASSED)
warning = partial(Check, WARNING)
failed = partial(Check, FAILED)
skipped = partial(Check, SKIPPED)


def enough(have: float, least: float, comfortable: float, found: str, fix: str = "") -> Check:
    """Failed below `least`, a warning below `comfortable`."""
    if have >= comfortable:
        return passed(found)
    if have >= least:
        return warning(found, fix)
    return failed(found, fix)


@dataclass(frozen=True)
class Die:
    """One NPU as `npu-smi info` shows it: /dev/davinci{number}; memory in MiB."""

    number: int
    health: str
    used: int
    total: int

    @property
    def sick(self) -> bool:
        return self.health not in WORKING


@dataclass(frozen=True)
class Seen:
    """The NPUs that each part of the machine sees."""

    dies: Sequence[Die] = ()  # of npu-smi
    mapped: Sequence[int] = ()  # the numbers of /dev/davinci*
    acl: int = 0  # CANN's count
    visible: list[str] | None = None  # ASCEND_RT_VISIBLE_DEVICES
    ray: Mapping[str, Any] | None = None  # the running cluster (ascend/cluster.py)
    faults: Mapping[str, ProbeError] = field(default_factory=dict)  # of a part that could not say

    def taken(self, count: int) -> Sequence[Die]:
        """The dies that a run of `count` takes: the first that are mapped. Where npu-smi has other
        numbers than /dev/davinci* (a container whose nodes have new names) the first of its list.
        """
        return [die for die in self.dies if die.number in self.mapped[:count]] or self.dies[:count]

    def counts(self) -> dict[str, int]:
        """The NPUs by part, from the hardware up. A Ray started in this shell would have CANN's
        count, else the device nodes, no more than the list has (ray/_private/accelerators/npu.py).
        """
        ray = self.acl or len(self.mapped)
        counts = {"/dev/davinci*": len(self.mapped), "CANN": self.acl}
        if self.dies:
            counts = {"npu-smi": sum(not die.sick for die in self.dies)} | counts
        if self.visible is not None:
            counts[LIST] = len(self.visible)
            ray = min(ray, counts[LIST])
        counts["Ray"] = ray
        if self.ray is not None:
            counts["Ray"] = int(self.ray["available"].get("NPU", 0)) // self.ray["nodes"]
        return counts


@dataclass(frozen=True)
class Case:
    """Describes what is to be launched on `machine`: the recipe of config `name`, and what the
    engine's own check found. `unread` are the faults of values that
    a layout depends on, in whose place `recipe` has defaults: then there is no `plan`, nor without
    a model.
    """

    recipe: Recipe
    faults: Sequence[Fault]
    unread: Sequence[Fault]
    name: str
    machine: Machine = field(default_factory=Machine)
    seen: Seen = Seen()

    # What a row of the table may need:

    @property
    def npus_here(self) -> bool:
        """True if any part of this machine sees an NPU."""
        return any((self.seen.dies, self.seen.mapped, self.seen.acl))

    @property
    def mixture(self) -> bool:
        """True if the model has experts."""
        return bool(self.recipe.model.arguments.get("num_experts"))

    @property
    def base_to_convert(self) -> bool:
        """True if base weights are given and not converted yet."""
        load = self.recipe.model.load
        return bool(load and not (Path(load) / TRACKER).is_file())

    @cached_property
    def plan(self) -> Plan | None:
        """The layout."""
        if not self.unread:
            with suppress(ConfigError):  # of the model: the engine's check has said so
                return plan_of(self.recipe)
        return None

    @property
    def legal(self) -> Plan | None:
        """The plan, if its layout breaks no rule."""
        if self.plan is None or broken(self.plan):
            return None
        return self.plan

    # What checks ask:

    @property
    def npus(self) -> int:
        """NPUs of the whole run."""
        return self.recipe.layout.world

    @property
    def ranks(self) -> int:
        """Ranks of this node, an NPU each."""
        return self.recipe.layout.node_width

    def accepts(self, name: str) -> bool:
        """Returns True if check `name` may fail (run.accepted_checks)."""
        return plain(name) in map(plain, self.recipe.run.accepted_checks)


@dataclass(frozen=True)
class Question:
    """One check: its line in the table.

    Attributes:
        verdict: answers for a case with one line, several, or None where there is nothing to say.
        fix: what to do where it fails or warns, unless the verdict knows better.
        needs: properties of `Case` without one of which the check is left out.
        refused: the engine refuses it by itself, so that run.accepted_checks cannot let it pass.
    """

    name: str
    verdict: Callable[[Case], Check | Iterable[Check] | None]
    fix: str = ""
    needs: str = ""
    refused: bool = False


def case_of(raw: Mapping[str, Any], name: str) -> Case:
    """The case of the resolved config `name`; ConfigError if its engine is none."""
    recipe, examined = examine(raw)
    engine_of(recipe)
    sections = (*UPSTREAM_SECTIONS, "model")
    unread = [
        fault
        for fault in examined.faults
        if fault.rule in UNREAD and fault.key.partition(".")[0] in sections
    ]
    return Case(recipe, examined.faults, unread, name)


def conversion(case: Case) -> list[str]:
    """The command that converts the base weights, as words.

    Raises:
        ConfigError: the layout breaks a rule, or there is no such command.
    """
    if case.plan is None:
        raise ConfigError(*(case.unread or case.faults))
    rules = [rule.message for rule in broken(case.plan)]
    if rules:
        raise ConfigError(
            f"no conversion for a layout that cannot exist: {'; '.join(rules)}. What can: "
            f"python tools/plan_layout.py --model {case.recipe.model.path} --ranks {case.npus}"
        )
    return conversion_command(case.recipe)


def plain(name: str) -> str:
    """A check's name as it is typed without quotes.

    >>> plain("CANN's version"), plain("/dev/davinci*")
    ('canns-version', 'dev-davinci')
    """
    return "-".join(re.findall(r"[a-z0-9._]+", name.lower().replace("'", "")))


def gigabytes(size: float) -> str:
    """
    >>> gigabytes(3.5e6), gigabytes(6.1e10), gigabytes(2e12)
    ('0.0 GB', '61.0 GB', '2,000 GB')
    """
    return f"{size / 1e9:,.{1 if size < 1e11 else 0}f} GB"
