"""One line of the table, what is to be launched, and the NPUs that the machine sees."""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS
from mindspeed_qerl.recipe.types import Recipe

PASSED, WARNING, FAILED, SKIPPED, ACCEPTED = "passed", "warning", "failed", "skipped", "accepted"
# Words of npu-smi for a die's health, in lower case. Its Warning is a minor alarm: the die works.
HEALTHY = ("ok", "normal", "正常")
SICK = (
    "alarm",
    "critical",
    "unknown",
    "fault",
    "abnormal",
    "offline",
    "告警",
    "重要告警",
    "紧急告警",
    "异常",
    "故障",
    "离线",
)


@dataclass(frozen=True)
class Check:
    """One line of the table. `fix` is what to do about it, commands as they are typed; empty if
    there is nothing to do.
    """

    name: str
    state: str
    found: str
    fix: str = ""
    group: str = ""


@dataclass(frozen=True)
class Die:
    """One NPU as `npu-smi info` shows it: `number` is that of its /dev/davinci*; memory in MiB,
    None if not told.
    """

    card: int
    chip: int
    number: int
    health: str
    used: int | None
    total: int | None

    @property
    def healthy(self) -> bool:
        return self.health.lower() in HEALTHY

    @property
    def sick(self) -> bool:
        """Not the opposite of healthy: of other words neither is known."""
        return self.health.lower() in SICK


@dataclass(frozen=True)
class Seen:
    """How many NPUs each part of the machine sees: a number, or a sentence why it could not be
    asked.
    """

    smi: list[Die] | str = "not asked"  # at least one
    # number of a die -> processes by npu-smi, in words; None if it does not tell them
    held: Mapping[int, list[str]] | None = field(default_factory=dict)
    closed: tuple[str, ...] = ()  # device nodes that cannot be opened, and why
    driver: str | None = None  # its version by npu-smi
    mapped: tuple[int, ...] = ()  # the numbers of /dev/davinci*
    cann: int | str = "not asked"
    visible: str | None = None  # ASCEND_RT_VISIBLE_DEVICES
    ray: Mapping[str, Any] | str | None = (
        None  # the running cluster (ascend/cluster.py); None if there is none
    )
    address: str | None = None  # RAY_ADDRESS, where no Ray runs on this machine
    stale: list[str] = field(
        default_factory=list
    )  # how the environment of the running Ray differs from the shell's

    @property
    def davinci(self) -> int:
        return len(self.mapped)

    @property
    def any(self) -> bool:
        return bool(
            self.davinci or isinstance(self.smi, list) or isinstance(self.cann, int) and self.cann
        )

    def taken(self, count: int) -> list[Die]:
        """The dies that a run of `count` takes: the first that are mapped. Where npu-smi has other
        numbers than /dev/davinci* (a container whose nodes have new names) the first of its list,
        or all if it lists more.
        """
        if not isinstance(self.smi, list):
            return []
        numbers, mapped = {die.number for die in self.smi}, set(self.mapped)
        if mapped and (numbers <= mapped or mapped <= numbers):
            return [die for die in self.smi if die.number in self.mapped[:count]]
        return self.smi if 0 < len(mapped) < len(self.smi) else self.smi[:count]

    @property
    def listed(self) -> int | None:
        """Entries of ASCEND_RT_VISIBLE_DEVICES as Ray counts them; None if it is not set
        (ray/_private/accelerators/npu.py)."""
        if self.visible is None:
            return None
        return len(self.visible.split(",")) if self.visible not in ("", "NoDevFiles") else 0

    @property
    def ray_would_count(self) -> int:
        """NPUs that a Ray started in this shell would have: CANN's count, else the device nodes, no
        more than the list has.
        """
        count = self.cann if isinstance(self.cann, int) else self.davinci
        return count if self.listed is None else min(count, self.listed)


@dataclass(frozen=True)
class Case:
    """What is to be launched: the recipe of config `name`, and what the engine's own check found.
    `nodes` share its NPUs equally; `own_ray`: a Ray is started for it, none is joined. `unread` are
    the faults of values that could not be read, in whose place `recipe` has defaults: then there is
    no `plan`, nor without a model.
    """

    recipe: Recipe
    faults: tuple[Fault, ...]
    unread: tuple[Fault, ...]
    plan: Plan | None
    name: str
    nodes: int
    own_ray: bool
    seen: Seen = Seen()

    @property
    def on_npus(self) -> bool:
        """Whether the run would use NPUs: its engine does, and they are not emulated."""
        return self.upstream and not self.recipe.emulate_npu

    @property
    def upstream(self) -> bool:
        return engine_of(self.recipe).UPSTREAM

    @property
    def rehearsal(self) -> bool:
        return self.recipe.rehearsal.enabled

    @property
    def npus(self) -> int:
        """NPUs of the whole run."""
        return self.recipe.layout.world

    @property
    def npus_here(self) -> int:
        return -(-self.npus // self.nodes)

    def accepts(self, name: str) -> bool:
        """Whether check `name` may fail (run.accepted_checks)."""
        return plain(name) in map(plain, self.recipe.run.accepted_checks)

    @property
    def legal(self) -> bool:
        return self.plan is not None and not broken(self.plan)


def case_of(raw: Mapping[str, Any], name: str, nodes: int = 1, own_ray: bool = False) -> Case:
    """The case of the resolved config `name`; ConfigError if its engine is none."""
    recipe, found = examine(raw)
    engine_of(recipe)
    faults, plan = list(found.faults), None
    unread = tuple(
        fault
        for fault in faults
        if fault.rule in ("value", "unknown", "missing")
        and fault.key.partition(".")[0] in ("model", *UPSTREAM_SECTIONS)
    )
    if not unread:
        try:
            plan = plan_of(recipe, ranks_per_node=-(-recipe.layout.world // nodes))
        except ConfigError as error:
            known = {fault.message for fault in faults}
            faults += [
                Fault("model", str(fault)) for fault in error.faults if str(fault) not in known
            ]
    return Case(recipe, tuple(faults), unread, plan, name, nodes, own_ray)


def needs(what: str, name: str, why: str) -> Callable:
    """For a check that only a case with `what`, one of its properties, has: else line `name` is
    skipped, for `why`.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def checks(machine: Any, case: Case) -> Iterable[Check]:
            return function(machine, case) if getattr(case, what) else [Check(name, SKIPPED, why)]

        return checks

    return decorate


def plain(name: str) -> str:
    """A check's name as it is typed without quotes.

    >>> plain("CANN's version"), plain("/dev/davinci*")
    ('canns-version', 'dev-davinci')
    """
    return "-".join(re.findall(r"[a-z0-9._]+", name.lower().replace("'", "")))


def quoted(path: object) -> str:
    """A path as it is typed in a command.

    >>> quoted("/data/my models")
    "'/data/my models'"
    """
    return shlex.quote(str(path))


def gigabytes(size: float) -> str:
    """
    >>> gigabytes(3.5e6), gigabytes(6.1e10), gigabytes(2e12)
    ('3.5 MB', '61.0 GB', '2,000 GB')
    """
    if size < 1e8:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"
