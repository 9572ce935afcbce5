"""One line of the table, and what is to be launched."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.engines import engine_of, examine
from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.reader import UPSTREAM_SECTIONS, read
from mindspeed_qerl.recipe.types import Recipe

if TYPE_CHECKING:
    from mindspeed_qerl.preflight.npus import Seen

PASSED, WARNING, FAILED, SKIPPED = "passed", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """One line of the table. `fix` is what to do about it, commands as they are typed; empty if there is nothing to
    do."""

    name: str
    state: str
    found: str
    fix: str = ""
    group: str = ""


@dataclass(frozen=True)
class Case:
    """What is to be launched: the recipe of config `name`, and what the engine's own check found. `nodes` share its
    NPUs equally; `own_ray`: a Ray is started for it, none is joined. `unread` are the faults of
    values that could not be read, in whose place `recipe` has defaults: then there is no `plan`, nor without a model.
    """

    recipe: Recipe
    faults: tuple[str, ...]
    unread: tuple[str, ...]
    plan: Plan | None
    name: str
    nodes: int
    own_ray: bool
    seen: "Seen"

    @property
    def on_npus(self) -> bool:
        """Whether the run would use NPUs: its engine does, and they are not emulated."""
        return self.upstream and not self.recipe.emulate_npu

    @property
    def upstream(self) -> bool:
        return engine_of(self.recipe).UPSTREAM

    @property
    def model_dir(self) -> Path:
        return Path(self.recipe.model.path)

    @property
    def npus(self) -> int:
        """NPUs of the whole run."""
        return self.recipe.layout.world

    @property
    def npus_here(self) -> int:
        return -(-self.npus // self.nodes)

    @property
    def legal(self) -> bool:
        return self.plan is not None and not broken(self.plan)


def case_of(raw: Mapping[str, Any], name: str, nodes: int = 1, own_ray: bool = False,
            seen: "Seen | None" = None) -> Case:
    """The case of the resolved config `name`; ConfigError if its engine is none."""
    from mindspeed_qerl.preflight.npus import Seen

    recipe, found = examine(raw)
    engine_of(recipe)
    faults, plan = list(found.faults), None
    unread = tuple(fault for fault in read(raw)[1].faults if fault.startswith(UPSTREAM_SECTIONS))
    if not unread:
        try:
            plan = plan_of(recipe, ranks_per_node=-(-recipe.layout.world // nodes))
        except ConfigError as error:
            faults += [line for line in str(error).splitlines() if line not in faults]
    return Case(recipe, tuple(faults), unread, plan, name, nodes, own_ray, seen or Seen())


def gigabytes(size: float) -> str:
    """
    >>> gigabytes(3.5e6), gigabytes(6.1e10), gigabytes(2e12)
    ('3.5 MB', '61.0 GB', '2,000 GB')
    """
    if size < 1e8:
        return f"{size / 1e6:,.1f} MB"
    return f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"
