"""The MindSpeed-RL engine: upstream's own `train`, with our classes where it looks its own up.

check upstream's sources -> join or start Ray -> check NPUs and CPUs -> put our classes into
cli/train_grpo.py's globals -> train(config)
"""

import importlib.util
import os
import sys
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.families import family_of, read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.progress import Progress

from . import imports
from .cluster import check_resources
from .contract import PINS, check, installed, require
from .limits import upstream_sections, worker_environment
from .observer import TokenObserver
from .ray_session import check_shared, in_order_of_nodes, ray_session
from .resume import base_for_resuming, last_checkpoint, read_position

# What CANN's and NNAL's set_env.sh set, for the workers of a Ray that was started without them.
PASSED_ON = (
    "PYTHONPATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_AICPU_PATH",
    "TOOLCHAIN_HOME",
    "ATB_HOME_PATH",
    "HF_HUB_OFFLINE",
)


def train(recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress) -> None:
    """Run `recipe` on NPUs, or with `emulate_npu` on CPUs.

    Raises:
        EngineError: upstream's sources are missing or do not fit, Ray has too few NPUs or CPUs, a
            worker failed, or a number cannot be right. ConfigError: the data does not fit the
            model.
    """
    progress.phase("checking upstream")
    environment = worker_environment(recipe, os.environ)
    if recipe.emulate_npu:
        from mindspeed_qerl import emulation

        environment |= emulation.enter(recipe.layout.world)
    for warning in check_upstream():
        progress.message(f"Warning: {warning}")
    progress.phase("starting Ray")
    os.environ.update(environment)
    environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    with ray_session(recipe, environment, logs):
        check_resources(recipe)
        if recipe.run.resume:
            check_shared(run.path)
        progress.phase("importing upstream")
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # in this process, which only imports it
        observer = TokenObserver(recipe, run, metrics, progress)
        # upstream's loggers write to stderr
        with open(logs / "driver.log", "a", encoding="utf-8") as log, redirect_stderr(log):
            upstream = load_upstream(recipe, observer)
            progress.phase("starting workers")
            call_train(upstream, recipe, run)


def check_upstream() -> list[str]:
    """Warnings of another version than the pin; EngineError if upstream is missing or not what we
    rely on (contract.py).
    """
    copies = installed()
    if missing := [pin.title for package, pin in PINS.items() if package not in copies]:
        raise EngineError(
            f"{', '.join(missing)} cannot be imported here. Put the pins' checkouts on PYTHONPATH; "
            "on NPUs install vllm-ascend (python setup.py install in its checkout): vLLM "
            "registers no plugin from PYTHONPATH alone (docs/ascend.md, Install)"
        )
    return require(check(copies))


def load_upstream(recipe: Recipe, observer: TokenObserver) -> ModuleType:
    """cli/train_grpo.py of MindSpeed-RL as a module, with our classes for those that its `train`
    has as globals. observer: what the trainer reports to. EngineError: it cannot be imported.
    """
    script = installed()["mindspeed_rl"] / "cli" / "train_grpo.py"
    spec = importlib.util.spec_from_file_location("mindspeed_rl_train_grpo", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise EngineError(
            f"upstream cannot be imported by {sys.executable}: {error}. {imports.way_out(str(error))}"
        ) from error

    from mindspeed_rl.workers.scheduler import launcher

    from .reward import QeRLRuleReward
    from .trainer import EndlessPrompts, QeRLTrainer
    from .worker import QeRLWorker

    launcher.resource_mapping["QeRLWorker"] = launcher.resource_mapping["IntegratedWorker"]
    construct = launcher.construct_placement_groups
    launcher.construct_placement_groups = lambda *sizes: in_order_of_nodes(construct(*sizes))
    module.IntegratedWorker = QeRLWorker
    module.RuleReward = QeRLRuleReward
    module.PromptDataLoader = EndlessPrompts
    module.RayGRPOTrainer = partial(QeRLTrainer, observer=observer)
    # MegatronConfig has no key for them
    arguments: dict[str, Any] = {}
    asked = 0
    if family_of(read_shape(recipe.model.path)).shared_expert:
        arguments["shared_expert_gate"] = True
    if recipe.run.resume:
        run = observer.run
        arguments["lora_load"] = str(run.checkpoints_dir.resolve())
        asked = read_position(run, last_checkpoint(recipe))["batches_asked"]
    ours = {"qerl": recipe, "batches_asked": asked}
    module.MegatronConfig = partial(_with_attributes, module.MegatronConfig, arguments)
    module.RLConfig = partial(_with_attributes, module.RLConfig, ours)
    return module


def _with_attributes(config_class: type, attributes: dict[str, Any], *arguments: Any) -> Any:
    """Makes one of upstream's configs with attributes besides: its class refuses keys that it does
    not know (base_config.py:32). What is put on MegatronConfig becomes an argument of Megatron's
    (utils/utils.py:337).
    """
    config = config_class(*arguments)
    vars(config).update(attributes)
    return config


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
        raise EngineError(
            f"a worker failed: {error}\nEach process's output is in {run.path / 'logs'}"
        ) from error
