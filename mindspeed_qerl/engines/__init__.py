"""The engine door: what every engine offers, and the one place that knows their names."""

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault, unknown
from mindspeed_qerl.common.imports import own_code
from mindspeed_qerl.recipe.keys import ENGINES
from mindspeed_qerl.recipe.reader import Found, read
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.description import DataFiles


def engine_of(recipe: Recipe) -> ModuleType:
    """The module `limits` of the engine that a recipe asks for; ConfigError with the nearest one.

    Importing it imports neither torch nor upstream. It has:
        MAY_CHANGE: keys that may have another value when a run is resumed. UPSTREAM: True if it
            runs MindSpeed-RL's own code: its sources, packed rows and converted base weights are
            needed.
        validate(recipe): a fault for each thing that this engine cannot do; reads config.json and
            looks for files, starts nothing.
        data_files(recipe): the files that a run reads, by label: their hashes go into the run
            directory.
        versions(): what versions.json says beside the installed packages.
        rehearsed(recipe, shape, rows, model_dir): `recipe`, already small (rehearsal/prepare.py),
            as this engine needs it for the model in `model_dir`.
    """
    if recipe.engine not in ENGINES:
        raise ConfigError(Fault("unknown", unknown("engine", recipe.engine, ENGINES), "engine"))
    return import_module(f"mindspeed_qerl.{ENGINES[recipe.engine]}.limits")


def trainer_of(recipe: Recipe) -> ModuleType:
    """The module `engine` of the engine of a recipe, which `engine_of` knows.

    It has:
        train(recipe, run, metrics, progress): runs it, or resumes it. ConfigError or EngineError if
            it cannot.
        last_checkpoint(recipe): the step after which the run in `recipe.run.resume` resumes;
            ValueError if it has no usable checkpoint.
    """
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
