"""The engine door: what every engine offers, and the one place that knows their names."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.common.imports import own_code
from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.recipe.keys import ENGINES
from mindspeed_qerl.recipe.reader import Found, read
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.description import DataFiles
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.rows import Row


class Engine(Protocol):
    """The module `limits` of an engine's package. Importing it imports neither torch nor
    upstream.
    """

    MAY_CHANGE: frozenset[str]  # keys that may have another value when a run is resumed
    # runs MindSpeed-RL's own code: its sources, packed rows and converted base weights are needed
    UPSTREAM: bool

    def validate(self, recipe: Recipe) -> Iterable[Fault]:
        """Returns what this engine cannot do with `recipe`; reads config.json and looks for files,
        starts nothing.
        """

    def data_files(self, recipe: Recipe) -> DataFiles:
        """The files that a run reads, by label: their hashes go into the run directory."""

    def versions(self) -> dict[str, Any]:
        """Returns what versions.json says beside the installed packages."""

    def rehearsed(
        self, recipe: Recipe, shape: ModelShape, rows: list[Row], model_dir: Path
    ) -> Recipe:
        """`recipe`, already small (rehearsal/prepare.py), as this engine needs it for the model in
        `model_dir`.
        """


class Trainer(Protocol):
    """The module `engine` of an engine's package, with all that it needs to run."""

    def train(
        self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress
    ) -> None:
        """Run it, or resume it. ConfigError or EngineError if it cannot."""

    def last_checkpoint(self, recipe: Recipe) -> int:
        """The step after which the run in `recipe.run.resume` resumes; ValueError if it has no
        usable checkpoint.
        """


def engine_of(recipe: Recipe) -> Engine:
    """The engine that a recipe asks for; ConfigError with the nearest one."""
    if recipe.engine not in ENGINES:
        raise ConfigError(Fault("unknown", unknown("engine", recipe.engine, ENGINES), "engine"))
    return import_module(f"mindspeed_qerl.{ENGINES[recipe.engine]}.limits")


def trainer_of(recipe: Recipe) -> Trainer:
    """Returns the trainer of a recipe whose engine `engine_of` knows."""
    return import_module(f"mindspeed_qerl.{ENGINES[recipe.engine]}.engine")


def data_files(recipe: Recipe) -> DataFiles:
    """The files that decide a run's numbers, by label: those that its engine reads, and the code of
    the user's own rewards and loss.
    """
    code = own_code([*recipe.task.verifier_function, recipe.algorithm.loss_mode])
    return {**engine_of(recipe).data_files(recipe), **code}


def examine(raw: Mapping[str, Any]) -> tuple[Recipe, Found]:
    """The Recipe of a resolved config and all that is wrong with it: values, keys that its engine
    does not honour, and what the engine cannot do.
    """
    recipe, found = read(raw)
    try:
        found.faults += engine_of(recipe).validate(recipe)
    except ConfigError as error:
        found.faults += error.faults
    return recipe, found
