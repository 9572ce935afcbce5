"""One line of the table, and what is to be launched."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.layout.plan import Plan, arguments_of, read_plan, shape_of_model
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.train import ENGINES

if TYPE_CHECKING:
    from mindspeed_qerl.preflight.npus import Seen

PASSED, WARNING, FAILED, SKIPPED = "passed", "warning", "failed", "skipped"


def check_engine(raw: Mapping[str, Any]) -> None:
    """ConfigError if the config's engine is none."""
    if raw.get("engine") not in tuple(ENGINES):
        raise ConfigError(unknown("engine", raw.get("engine"), ENGINES))


@dataclass(frozen=True)
class Check:
    """One line of the table. `mend` is what to do about it, commands as they are typed; empty if there is nothing to do."""

    name: str
    state: str
    found: str
    mend: str = ""
    group: str = ""


@dataclass(frozen=True)
class Case:
    """What is to be launched. `nodes` share its NPUs equally; `own_ray`: a Ray is started for it, none is joined."""

    raw: Mapping[str, Any]
    name: str
    nodes: int
    own_ray: bool
    seen: "Seen"

    @property
    def on_npus(self) -> bool:
        return self.raw.get("engine") == "mindspeed_rl" and self.raw.get("emulate_npu") is not True

    @property
    def upstream(self) -> bool:
        return self.raw.get("engine") == "mindspeed_rl"

    @property
    def rehearsed(self) -> bool:
        return self.section("rehearsal").get("enabled") is True

    @cached_property
    def arguments(self) -> dict[str, Any]:
        return arguments_of(self.raw)

    @property
    def model_dir(self) -> Path:
        return Path(str(self.arguments.get("tokenizer_name_or_path")))

    def section(self, name: str) -> Mapping[str, Any]:
        return self.raw.get(name) or {}

    @property
    def npus(self) -> int:
        """NPUs of the whole run."""
        asked = (self.section("rl_config").get("actor_resource") or {}).get("num_npus")
        return asked if isinstance(asked, int) and asked > 0 else 1

    @property
    def npus_here(self) -> int:
        return -(-self.npus // self.nodes)

    @cached_property
    def faults(self) -> list[str]:
        """What the engine's own check of the config says, a line each."""
        try:
            import_module(f"{ENGINES[self.raw['engine']]}.settings").check(self.raw)
        except ConfigError as error:
            return str(error).splitlines()
        return []

    @cached_property
    def plan(self) -> Plan | None:
        """The config's plan, for the model's own shape if its directory is there; None if its values make none (`faults` says which)."""
        try:
            return read_plan(self.raw, shape_of_model(self.raw), ranks_per_node=self.npus_here)
        except ConfigError as error:
            self.faults.extend(line for line in str(error).splitlines() if line not in self.faults)
            return None

    @property
    def legal(self) -> bool:
        return self.plan is not None and not broken(self.plan)


def gigabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e9:,.1f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"
