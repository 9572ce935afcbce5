"""The MindSpeed-RL engine: upstream's own `train`, with our classes where it looks its own up, on a
Ray that we start.

check upstream's sources -> start Ray -> check NPUs and CPUs -> put our classes into
cli/train_grpo.py's globals -> train(config)
"""

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from mindspeed_qerl.ascend import imports
from mindspeed_qerl.ascend.cluster import (
    check_resources,
    check_shared,
    keep_logs,
    other_nodes,
    this_node_first,
)
from mindspeed_qerl.ascend.contract import PINS, check, installed, require
from mindspeed_qerl.ascend.limits import (
    epoch_steps,
    needed_cpus,
    upstream_sections,
    worker_environment,
)
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.files import (
    POSITION,
    TRACKER,
    checkpoint_iterations,
    describe_files,
    fault_of_files,
    write_whole,
)
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.families import end_tokens, family_of, read_shape
from mindspeed_qerl.lora.proof import Movement, in_words
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.checks import StepChecks, is_sync_shown, sync_faults
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl
from mindspeed_qerl.runs.progress import Progress
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.packed import read_packed_rows, rows_of_labels
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rewards import first_reward

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
    """Run `recipe` on NPUs, or with `emulate_npu` on CPUs. EngineError: upstream's sources are
    missing or do not fit, Ray has too few NPUs or CPUs, a worker failed. ConfigError: the data does
    not fit the model.
    """
    progress.phase("checking upstream")
    environment = worker_environment(recipe, os.environ)
    if recipe.emulate_npu:
        from mindspeed_qerl import emulation

        environment |= emulation.enter(recipe.layout.world)
    for warning in check_upstream():
        progress.message(f"Warning: {warning}")
    if recipe.noise.restart_every == "epoch":
        run.record(aqn_restart_every=epoch_steps(recipe))
    progress.phase("starting Ray")
    os.environ.update(environment)
    environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    start_ray(recipe, environment)
    # a scheduler's stop is an interrupt; Ray's own handler would abort
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ray_logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    logs, others = run.path / "logs", other_nodes()
    logs.mkdir(exist_ok=True)
    try:
        check_resources(recipe)
        if recipe.run.resume:
            check_shared(run.path, others)
        progress.phase("importing upstream")
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # in this process, which only imports it
        observer = RunObserver(recipe, run, metrics, progress)
        # upstream's loggers write to stderr
        with open(logs / "driver.log", "a", encoding="utf-8") as log, redirect_stderr(log):
            upstream = load_upstream(recipe, observer)
            progress.phase("starting workers")
            _call(upstream, recipe, run)
    finally:
        keep_logs(ray_logs, logs, others)
        private_ray.stop()


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


def start_ray(recipe: Recipe, environment: dict[str, str]) -> None:
    """Join the cluster of RAY_ADDRESS, or the one `ray start` left here, or start one for this run."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    runtime_env = {"env_vars": environment}
    if recipe.emulate_npu:
        private_ray.start(
            runtime_env=runtime_env,
            num_cpus=needed_cpus(recipe),
            resources={"NPU": recipe.layout.world},
        )
        return
    if (
        os.environ.get("RAY_ADDRESS") == "local"
    ):  # Ray's own reading of it listens on every interface
        private_ray.start(runtime_env=runtime_env)
        return
    try:
        ray.init(
            address="auto", runtime_env=runtime_env, log_to_driver=False, logging_level="ERROR"
        )
    except ConnectionError:
        private_ray.start(runtime_env=runtime_env)


def load_upstream(recipe: Recipe, observer: "RunObserver") -> ModuleType:
    """cli/train_grpo.py of MindSpeed-RL as a module, with our classes for those that its `train`
    has as globals.
    """
    package = importlib.util.find_spec("mindspeed_rl")
    script = Path(package.submodule_search_locations[0]).parent / "cli" / "train_grpo.py"
    spec = importlib.util.spec_from_file_location("mindspeed_rl_train_grpo", script)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise EngineError(imports.of_the_driver(error)) from error

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
    arguments = dict(
        family_of(read_shape(recipe.model.path)).extra_arguments
    )  # MegatronConfig has no key for them
    if recipe.run.resume:
        arguments["lora_load"] = str(RunDirectory.open(recipe.run.resume).checkpoints_dir.resolve())
    module.MegatronConfig = _with_attributes(module.MegatronConfig, arguments)
    module.RLConfig = _with_attributes(
        module.RLConfig, {"qerl": recipe, "batches_asked": batches_asked(recipe)}
    )
    return module


def _with_attributes(config_class: type, attributes: dict[str, Any]) -> Callable[..., Any]:
    """Upstream's config class with more attributes: it refuses keys that it does not know
    (base_config.py:32). What is put on MegatronConfig becomes an argument of Megatron's
    (utils/utils.py:337).
    """

    def build(*args: Any) -> Any:
        config = config_class(*args)
        for name, value in attributes.items():
            setattr(config, name, value)
        return config

    return build


def _call(upstream: ModuleType, recipe: Recipe, run: RunDirectory) -> None:
    from omegaconf import OmegaConf

    sections = OmegaConf.create(upstream_sections(recipe))
    sections.actor_config.save = str(run.checkpoints_dir.resolve())
    if recipe.run.resume:
        # The base weights from `load`, the rest from `lora_load` (MindSpeed-LLM
        # training/checkpointing.py:68-75); `finetune` would set the iteration to 0 and leave the
        # optimizer out.
        sections.actor_config.update(
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
            load=str(base_for_resuming(Path(sections.actor_config.load), recipe, run)),
        )
    try:
        upstream.train._function(sections)
    except ray.exceptions.RayError as error:
        why = imports.of_a_worker(str(error)) or error
        raise EngineError(
            f"a worker failed: {why}\nEach process's output is in {run.path / 'logs'}"
        ) from error


def base_for_resuming(base: Path, recipe: Recipe, run: RunDirectory) -> Path:
    """The base checkpoint once more, as links, under the step of the run's last checkpoint and with
    that one's optimizer state: Megatron takes the step and the distributed optimizer's state from
    `load` (training/checkpointing.py:1400-1411), never from `lora_load`.
    """
    step = last_checkpoint(recipe)
    tracker = (base / TRACKER).read_text().strip()
    weights = base / ("release" if tracker == "release" else f"iter_{int(tracker):07d}")
    view = run.path / "resume" / f"iter_{step:07d}"
    shutil.rmtree(view.parent, ignore_errors=True)
    for rank in (run.checkpoints_dir / view.name).glob("mp_rank_*"):
        (view / rank.name).mkdir(parents=True)
        for name, folder in (
            ("model_optim_rng.pt", weights / rank.name),
            ("distrib_optim.pt", rank),
        ):
            if (folder / name).is_file():
                (view / rank.name / name).symlink_to((folder / name).resolve())
            elif name == "model_optim_rng.pt":
                raise EngineError(
                    f"actor_config.load = {base} has no {folder.name}/{name}, which the run's "
                    "checkpoint has: it is for another layout"
                )
    (view.parent / TRACKER).write_text(str(step))
    return view.parent.resolve()


def last_checkpoint(recipe: Recipe) -> int:
    """The step that the run in `recipe.run.resume` can resume after; ValueError if it saved none,
    or the last one is another run's, or not what was saved.
    """
    run = RunDirectory.open(recipe.run.resume)
    there, tracker = checkpoint_iterations(run.checkpoints_dir), run.checkpoints_dir / TRACKER
    try:
        step = int(tracker.read_text())
    except OSError as error:
        raise ValueError(
            f"{recipe.run.resume} has no checkpoint to resume from ({error}). One is saved every "
            "megatron_training.save_interval steps. Start a new run without run.resume"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{tracker} names no checkpoint ({error}): the run was killed while it was written. "
            f"Write the number of the last one into it; there are: {', '.join(map(str, there))}"
        ) from error
    checkpoint, position = run.checkpoints_dir / f"iter_{step:07d}", position_of(run, step)
    run.check_owner(checkpoint, position.get("run"))
    fault = fault_of_files(checkpoint, position.get("files", {}))
    if run.id and not position:
        fault = f"{POSITION}, which has the position in the data, is missing"
    if fault:
        before = [number for number in there if number < step]
        way_out = (
            f"write {before[-1]} into {tracker} to resume from that one"
            if before
            else "there is no other checkpoint: start a new run"
        )
        raise ValueError(
            f"the checkpoint {checkpoint} is damaged: {fault}. Bring the file back, or {way_out}"
        )
    return step


def position_of(run: RunDirectory, step: int) -> dict[str, Any]:
    """What `RunObserver.saving` wrote beside a checkpoint; empty where an earlier version saved it."""
    file = run.checkpoints_dir / f"iter_{step:07d}" / POSITION
    return json.loads(file.read_text()) if file.is_file() else {}


def batches_asked(recipe: Recipe) -> int:
    """Batches of prompts that the run which is resumed had asked at its last checkpoint; 0 for a
    new one.
    """
    if not recipe.run.resume:
        return 0
    step = last_checkpoint(recipe)
    # before it was written there, each step asked one batch
    return position_of(RunDirectory.open(recipe.run.resume), step).get("batches_asked", step)


class RunObserver:
    """Writes what upstream's trainer tells (trainer.QeRLTrainer) into the run directory, and
    evaluates when due.
    """

    def __init__(
        self, recipe: Recipe, run: RunDirectory, metrics: MetricsWriter, progress: Progress
    ):
        self.recipe, self.run, self.metrics, self.progress = recipe, run, metrics, progress
        self.step = 0  # the last one
        self.is_proved = False  # that LoRA reaches vLLM
        self.checks = StepChecks(recipe, epoch_steps(recipe), read_shape(recipe.model.path).moe)
        if recipe.run.resume:
            self.checks.resume(read_jsonl(run.metrics_file))
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.task = Prompts(
            recipe.task.test_file,
            self.tokenizer,
            recipe.task.prompt,
            recipe.sampling.max_prompt_length,
            recipe.evaluation.n_problems,
            run.started,
        )
        run.keep(evaluation_prompts=self.task.digest())
        self.packed_rows = read_packed_rows(recipe.task.data_path)
        self.ends = {self.tokenizer.eos_token_id} - {None} | end_tokens(
            recipe.model.path
        )  # of an answer

    def started(self, ranks: list[dict[str, Any]]) -> None:
        """Names what is trained and what gets noise, once. ranks: QeRLWorker.describe() of each."""
        counts = [pair for rank in ranks for pair in rank["lora"].items()]
        totals = {
            target: {
                key: sum(count[key] for name, count in counts if name == target)
                for key in ("modules", "parameters")
            }
            for target, _ in counts
        }
        if missing := [
            target
            for target in self.recipe.lora.targets
            if not totals.get(target, {}).get("modules")
        ]:
            raise EngineError(
                f"LoRA target {', '.join(missing)} trains nothing in this model; it trains {totals}"
            )
        self.run.record(lora=totals, aqn_layers=ranks[0]["aqn"])
        if self.recipe.quantization.enabled and not self.recipe.lora.targets:
            self.progress.message(
                "Warning: without LoRA no sync is proved, nor that vLLM's weights are quantised"
            )
        if self.task.dropped:
            self.progress.message(self.task.left_out("evaluation"))
        for target, total in totals.items():
            self.progress.message(
                f"LoRA trains {target}: {total['modules']} modules, {total['parameters']:,} "
                "parameters over all ranks"
            )
        if ranks[0]["aqn"]:
            self.progress.message(
                f"AQN targets {len(ranks[0]['aqn'])} RMSNorm layers: {', '.join(ranks[0]['aqn'])}"
            )

    def stepped(
        self,
        step: int,
        metrics: dict[str, float],
        values: dict[str, float],
        tokens: int,
        routes: int,
        experience: dict[str, list],
    ) -> None:
        """One row of metrics.jsonl, and samples of this step's answers, after update `step`.
        EngineError for numbers that cannot be true.

        Args:
            metrics: by upstream's names. values: by ours. tokens: that each epoch was to train.
                routes: tokens whose routes each epoch was to replay. experience: the transfer
                dock's columns, one tensor per answer.
        """
        self.step, values = step, to_our_names(metrics) | values
        self.metrics.log(step, values)
        for warning in self.checks.check(step, values, tokens, routes):
            self.progress.message(f"Warning: {warning}")
        if "aqn/sigma" in values and values["aqn/sigma"] > 0:
            self.progress.message(
                f"AQN step {step}: Applied noise to {values['aqn/layers']} RMSNorm layers: "
                f"sigma {values['aqn/sigma']:.3g}, measured std {values['aqn/measured_std']:.3g}"
            )
        kept = slice(self.recipe.run.rollout_samples)
        questions, responses, labels = (
            self.tokenizer.batch_decode(experience[column][kept], skip_special_tokens=True)
            for column in ("prompts", "responses", "labels")
        )
        rewards = map(float, experience["rm_scores"])
        shown = zip(questions, responses, rows_of_labels(labels, self.packed_rows), rewards)
        self.metrics.log_rollouts(
            step,
            [
                {"question": question, "response": response, "answer": row.answer, "reward": reward}
                for question, response, row, reward in shown
            ],
        )
        self.progress.step(step, values)

    def wants_proof(self, step: int) -> bool:
        """Whether to prove after `step` that LoRA reaches vLLM: until every target is seen to have
        moved, every `run.prove_every` steps, and after the last.
        """
        run = self.recipe.run
        return bool(self.recipe.lora.targets) and (
            not self.is_proved or step % run.prove_every == 0 or step == run.train_iters
        )

    def proved(self, step: int, movement: Movement, unlike: list[str]) -> None:
        """What the adapters did to vLLM's weights; EngineError where that is not (alpha / r) B A,
        or where weights are `unlike` the rounding of what was synced (QuantizedModel.unlike).
        """
        faults = sync_faults(movement)
        if unlike:
            faults.append(
                "vLLM's kernels multiply with something else than "
                f"{self.recipe.quantization.format} of what was synced in {len(unlike)} weights: "
                f"{', '.join(unlike[:3])}{', ...' if len(unlike) > 3 else ''}"
            )
        if faults:
            raise EngineError(f"the sync after step {step}: " + "\n".join(faults))
        if is_sync_shown(movement):
            self.run.record(lora_movement=movement, lora_proved_after=step)
            if not self.is_proved:
                self.progress.message(f"LoRA reached the rollout engine: {in_words(movement)}")
            self.is_proved = True

    def saving(self, step: int, batches: int) -> None:
        """Before checkpoint `step` is written: beside it the batches of prompts that were asked so
        far, so that whatever Megatron's tracker names has them.
        """
        folder = self.run.checkpoints_dir / f"iter_{step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(
            folder / POSITION, json.dumps({"batches_asked": batches, **self.run.identity()})
        )

    def saved(self, step: int) -> None:
        """Checkpoint `step` is on disk; its files are described, those of other machines' disks
        aside.
        """
        folder = self.run.checkpoints_dir / f"iter_{step:07d}"
        files = describe_files(folder, folder.glob("mp_rank_*/*"))
        write_whole(folder / POSITION, json.dumps({**position_of(self.run, step), "files": files}))
        self.progress.message(f"Checkpoint of step {step} saved")

    def evaluate(self, step: int, generate: Callable) -> None:
        """Accuracy on the test file, noise off: before step 1, every eval.every steps, and after
        the last.

        generate(prompts, n, temperature) gives n answers' token ids per prompt.
        """
        evaluation, started = self.recipe.evaluation, time.perf_counter()
        if step % evaluation.every and step != self.recipe.run.train_iters:
            return
        self.progress.phase("evaluation")
        answers = generate(
            self.task.prompts, evaluation.samples_per_problem, evaluation.temperature
        )
        limit = self.recipe.sampling.max_tokens
        texts = self.tokenizer.batch_decode(
            [ids for group in answers for ids in group], skip_special_tokens=True
        )
        cut = [
            len(ids) >= limit and self.tokenizer.eos_token_id not in ids
            for group in answers
            for ids in group
        ]
        result, scored = evaluate_answers(
            self.task.rows,
            texts,
            cut,
            evaluation.samples_per_problem,
            first_reward(self.recipe.task.verifiers),
        )
        result |= {"temperature": evaluation.temperature, "seconds": time.perf_counter() - started}
        self.metrics.log_eval(step, result, scored)
        self.progress.evaluated(step, result)


# Upstream's metric names (trainer/utils/compute_utils.py, workers/*.py) -> runs/metrics.py's.
# Others keep theirs after "upstream/".
OUR_NAMES = {
    "actor/grad_norm": "grad_norm",
    "grad_norm": "grad_norm",
    "actor/lr": "lr",
    "timing/all": "time/step",
    "timing/rollout": "time/rollout",
    "timing/rule_reward": "time/reward",
    "timing/old_log_p": "time/logprobs",
    "timing/update": "time/update",
    "timing/resharding_to_infer": "time/sync",
}


def to_our_names(metrics: dict[str, Any]) -> dict[str, float]:
    """Upstream's metrics of one step by our names; what is no number is left out."""
    named = {}
    for name, value in metrics.items():
        ours = OUR_NAMES.get(name, name if name.startswith("aqn/") else f"upstream/{name}")
        if name.endswith("_rewards/mean"):
            ours = f"verifier/{name.removesuffix('_rewards/mean')}/mean"
        try:
            # upstream averages over the ranks
            named[ours] = int(value) if ours in ("aqn/stage", "aqn/layers") else float(value)
        except (TypeError, ValueError):
            continue
    return named
