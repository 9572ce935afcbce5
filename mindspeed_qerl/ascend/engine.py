"""The MindSpeed-RL engine: upstream's own `train`, with our classes where it looks its own up.

check upstream's sources -> join or start Ray -> check NPUs and CPUs -> put our classes into
cli/train_grpo.py's globals -> train(config)
"""

import os
from contextlib import redirect_stderr

from mindspeed_qerl.ascend.cluster import check_resources
from mindspeed_qerl.ascend.contract import PINS, check, installed, require
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.ascend.observer import TokenObserver
from mindspeed_qerl.ascend.ray_session import check_shared, ray_session
from mindspeed_qerl.ascend.resume import last_checkpoint
from mindspeed_qerl.ascend.upstream import call_train, load_upstream
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter
from mindspeed_qerl.runs.progress import Progress

__all__ = ["last_checkpoint", "train"]  # engines.Trainer

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
