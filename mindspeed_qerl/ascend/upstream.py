"""Upstream's own `train`, with our classes where it looks its own up."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from mindspeed_qerl.ascend import imports
from mindspeed_qerl.ascend.limits import upstream_sections
from mindspeed_qerl.ascend.observer import TokenObserver
from mindspeed_qerl.ascend.ray_session import this_node_first
from mindspeed_qerl.ascend.resume import base_for_resuming, batches_asked
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.families import family_of, read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory


def load_upstream(recipe: Recipe, observer: TokenObserver) -> ModuleType:
    """cli/train_grpo.py of MindSpeed-RL as a module, with our classes for those that its `train`
    has as globals. observer: what the trainer reports to. EngineError: it cannot be imported.
    """
    package = importlib.util.find_spec("mindspeed_rl")
    script = Path(package.submodule_search_locations[0]).parent / "cli" / "train_grpo.py"
    spec = importlib.util.spec_from_file_location("mindspeed_rl_train_grpo", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        reason = imports.explained(str(error))
        raise EngineError(f"upstream cannot be imported by {sys.executable}: {reason}") from error

    from mindspeed_rl.workers.scheduler import launcher

    from mindspeed_qerl.ascend.reward import QeRLRuleReward
    from mindspeed_qerl.ascend.trainer import EndlessPrompts, QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    launcher.resource_mapping[QeRLWorker.__ray_actor_class__.__name__] = lambda config: (
        config.actor_resource
    )
    launcher.construct_placement_groups = this_node_first(launcher.construct_placement_groups)
    module.IntegratedWorker = QeRLWorker
    module.RuleReward = QeRLRuleReward
    module.PromptDataLoader = EndlessPrompts
    module.RayGRPOTrainer = partial(QeRLTrainer, observer=observer)
    # MegatronConfig has no key for them
    arguments = dict(family_of(read_shape(recipe.model.path)).extra_arguments)
    if recipe.run.resume:
        arguments["lora_load"] = str(RunDirectory.open(recipe.run.resume).checkpoints_dir.resolve())
    ours = {"qerl": recipe, "batches_asked": batches_asked(recipe)}
    module.MegatronConfig = _with_attributes(module.MegatronConfig, arguments)
    module.RLConfig = _with_attributes(module.RLConfig, ours)
    return module


def _with_attributes(config_class: type, attributes: dict[str, Any]) -> Callable[..., Any]:
    """Adds attributes to upstream's config class, which refuses keys that it does not know
    (base_config.py:32). What is put on MegatronConfig becomes an argument of Megatron's
    (utils/utils.py:337).
    """

    def build(*args: Any) -> Any:
        config = config_class(*args)
        vars(config).update(attributes)
        return config

    return build


def call_train(upstream: ModuleType, recipe: Recipe, run: RunDirectory) -> None:
    """Runs upstream's `train` in this process; EngineError with a worker's failure."""
    from omegaconf import OmegaConf

    sections = OmegaConf.create(upstream_sections(recipe))
    actor = sections.actor_config
    actor.save = str(run.checkpoints_dir.resolve())
    if recipe.run.resume:
        # The base weights from `load`, the rest from `lora_load` (MindSpeed-LLM
        # training/checkpointing.py:68-75); `finetune` would set the iteration to 0 and leave the
        # optimizer out.
        actor.update(finetune=False, no_load_optim=False, no_load_rng=False)
        actor.load = str(base_for_resuming(Path(actor.load), recipe, run))
    try:
        upstream.train._function(sections)
    except ray.exceptions.RayError as error:
        reason = imports.of_a_worker(str(error)) or error
        raise EngineError(
            f"a worker failed: {reason}\nEach process's output is in {run.path / 'logs'}"
        ) from error
