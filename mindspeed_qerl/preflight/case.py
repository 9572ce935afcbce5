"""One line of the table, what is to be launched, and the NPUs that the machine sees."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.preflight.machine import ProbeError
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS
from mindspeed_qerl.recipe.types import Recipe

PASSED, WARNING, FAILED, SKIPPED, ACCEPTED = "passed", "warning", "failed", "skipped", "accepted"
# Words of npu-smi for a die's health, in lower case. Its Warning is a minor alarm: the die works.
HEALTHY = ("ok", "normal", "正常")
SICK = ("alarm", "critical", "unknown", "fault", "abnormal", "offline") + tuple(
    "告警 重要告警 紧急告警 异常 故障 离线".split()
)
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


passed, warning = partial(Check, PASSED), partial(Check, WARNING)
failed, skipped = partial(Check, FAILED), partial(Check, SKIPPED)


def enough(have: float, least: float, comfortable: float, found: str, fix: str = "") -> Check:
    """Failed below `least`, a warning below `comfortable`."""
    if have >= comfortable:
        return passed(found)
    if have >= least:
        return warning(found, fix)
    return failed(found, fix)


@dataclass(frozen=True)
class Die:
    """One NPU as `npu-smi info` shows it: `number` is that of its /dev/davinci*; memory in MiB,
    0 where npu-smi does not print it.
    """

    card: int
    chip: int
    number: int
    health: str
    used: int
    total: int

    @property
    def healthy(self) -> bool:
        return self.health.lower() in HEALTHY

    @property
    def sick(self) -> bool:
        """Not the opposite of healthy: of other words neither is known."""
        return self.health.lower() in SICK


@dataclass(frozen=True)
class Seen:
    """How many NPUs each part of the machine sees; a ProbeError where it could not be asked."""

    dies: list[Die] = field(default_factory=list)  # of npu-smi
    smi_fault: ProbeError | None = None  # why it lists none
    # number of a die -> processes by npu-smi, in words; None if it prints none
    held: Mapping[int, list[str]] | None = field(default_factory=dict)
    closed: tuple[str, ...] = ()  # device nodes that cannot be opened, and why
    driver: str | None = None  # its version by npu-smi
    mapped: tuple[int, ...] = ()  # the numbers of /dev/davinci*
    cann: int | ProbeError = 0
    visible: str | None = None  # ASCEND_RT_VISIBLE_DEVICES
    # the running cluster (ascend/cluster.py); None if there is none
    ray: Mapping[str, Any] | ProbeError | None = None
    address: str | None = None  # RAY_ADDRESS, where no Ray runs on this machine
    # how the environment of the running Ray differs from the shell's
    stale: list[str] = field(default_factory=list)

    @property
    def davinci(self) -> int:
        return len(self.mapped)

    @property
    def acl(self) -> int | None:
        """CANN's count; None if it could not be asked."""
        if isinstance(self.cann, ProbeError):
            return None
        return self.cann

    @property
    def cluster(self) -> Mapping[str, Any] | None:
        if isinstance(self.ray, ProbeError):
            return None
        return self.ray

    def npus_of_ray(self, which: str) -> int:
        """Of the running cluster: its `resources`, or what is `available` of them."""
        assert self.cluster is not None, "asked only where there is one"
        return int(self.cluster[which].get("NPU", 0))

    def taken(self, count: int) -> list[Die]:
        """The dies that a run of `count` takes: the first that are mapped. Where npu-smi has other
        numbers than /dev/davinci* (a container whose nodes have new names) the first of its list,
        or all if it lists more.
        """
        numbers, mapped = {die.number for die in self.dies}, set(self.mapped)
        if mapped and (numbers <= mapped or mapped <= numbers):
            return [die for die in self.dies if die.number in self.mapped[:count]]
        if 0 < len(mapped) < len(self.dies):
            return self.dies
        return self.dies[:count]

    @property
    def listed(self) -> int | None:
        """Entries of ASCEND_RT_VISIBLE_DEVICES as Ray counts them; None if it is not set
        (ray/_private/accelerators/npu.py).
        """
        if self.visible is None:
            return None
        if self.visible not in ("", "NoDevFiles"):
            return len(self.visible.split(","))
        return 0

    @property
    def ray_would_count(self) -> int:
        """NPUs that a Ray started in this shell would have: CANN's count, else the device nodes, no
        more than the list has.
        """
        count = self.davinci if self.acl is None else self.acl
        if self.listed is None:
            return count
        return min(count, self.listed)


@dataclass(frozen=True)
class Case:
    """What is to be launched: the recipe of config `name`, and what the engine's own check found.
    `nodes` share its NPUs equally; `own_ray`: a Ray is started for it, none is joined. `unread` are
    the faults of values that a layout depends on, in whose place `recipe` has defaults: then there
    is no `plan`, nor without a model.
    """

    recipe: Recipe
    faults: tuple[Fault, ...]
    unread: tuple[Fault, ...]
    plan: Plan | None
    name: str
    nodes: int
    own_ray: bool
    seen: Seen = Seen()

    # What a row of the table may need:

    @property
    def upstream(self) -> bool:
        return engine_of(self.recipe).UPSTREAM

    @property
    def on_npus(self) -> bool:
        """Whether the run would use NPUs: its engine does, and they are not emulated."""
        return self.upstream and not self.recipe.emulate_npu

    @property
    def npus_here(self) -> bool:
        """Whether it would, and any part of this machine sees one."""
        return self.on_npus and bool(self.seen.dies or self.seen.davinci or self.seen.acl)

    @property
    def several_nodes(self) -> bool:
        return self.on_npus and self.nodes > 1

    @property
    def two_launchers(self) -> bool:
        return self.several_nodes and self.own_ray

    @property
    def model_given(self) -> bool:
        """Whether the config's own model is used: a rehearsal makes one."""
        return not self.recipe.rehearsal.enabled

    @property
    def upstream_rules(self) -> bool:
        """Whether upstream's rules of layouts hold, as for a rehearsal too."""
        return self.upstream or self.recipe.rehearsal.enabled

    @property
    def reads_rows(self) -> bool:
        """Whether training reads rows, and not packed files."""
        return not self.upstream

    @property
    def base_to_convert(self) -> bool:
        """Whether base weights are given and not converted yet."""
        load = self.recipe.model.load
        return bool(self.upstream and load and not (Path(load) / TRACKER).is_file())

    # What checks ask:

    @property
    def npus(self) -> int:
        """NPUs of the whole run."""
        return self.recipe.layout.world

    @property
    def ranks(self) -> int:
        """Ranks of this node, an NPU each."""
        return -(-self.npus // self.nodes)

    @property
    def expert_parallel(self) -> bool:
        """Whether vLLM spreads experts over ranks."""
        layout, plan = self.recipe.layout, self.plan
        experts = plan is not None and plan.shape.moe
        return experts and layout.enable_expert_parallel and layout.infer_ep > 1

    @property
    def legal(self) -> Plan | None:
        """The plan, if its layout breaks no rule."""
        if self.plan is None or broken(self.plan):
            return None
        return self.plan

    def accepts(self, name: str) -> bool:
        """Whether check `name` may fail (run.accepted_checks)."""
        return plain(name) in map(plain, self.recipe.run.accepted_checks)


def case_of(raw: Mapping[str, Any], name: str, nodes: int = 1, own_ray: bool = False) -> Case:
    """The case of the resolved config `name`; ConfigError if its engine is none."""
    recipe, examined = examine(raw)
    engine_of(recipe)
    faults, plan = list(examined.faults), None
    unread = tuple(fault for fault in faults if _is_unread(fault))
    if not unread:
        try:
            plan = plan_of(recipe, ranks_per_node=-(-recipe.layout.world // nodes))
        except ConfigError as error:
            known = {fault.message for fault in faults}
            faults += [
                Fault("model", line) for line in str(error).splitlines() if line not in known
            ]
    return Case(recipe, tuple(faults), unread, plan, name, nodes, own_ray)


def _is_unread(fault: Fault) -> bool:
    section = fault.key.partition(".")[0]
    return fault.rule in UNREAD and section in (*UPSTREAM_SECTIONS, "model")


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
    if size < 1e11:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e9:,.0f} GB"
