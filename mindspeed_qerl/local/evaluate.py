"""Evaluate a model, or a checkpoint of a run on the rows of a task: greedily, and with
several samples.

One folder for each evaluation, in a run RUN/evaluations/<name>/:

    summary.json   what was evaluated and how; numbers of tasks/evaluation.py: "greedy", "sampled"
    answers.jsonl  a row for each question, as in eval_answers.jsonl: the samples, or without any
                   the greedy answers
    greedy.jsonl   the greedy answers, if there are samples as well
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_qerl import emulation
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import json_text, new_directory, whole_checkpoints
from mindspeed_qerl.common.imports import own_code
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.recipe.fields import Count, Positive, Size, part
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.recipe.types import Quantization
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import append_rows
from mindspeed_qerl.tasks.evaluation import evaluate_answers, evaluation_settings
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rewards import try_rewards

from .batch import decoded, sampling_of
from .limits import beyond_kernels


@part()
class EvaluationJob:
    """Describes what is evaluated, and how: `model`, or the same with the adapters of a run's
    checkpoint. ValueError if a value is out of its range. tools/evaluate.py describes each.
    """

    model: str
    data: str
    run: str | None = None
    step: Count | None = None
    prompt: str = "chat"
    chat_template_kwargs: dict[str, Any] | None = None
    verifier: str = "gsm8k"
    problems: Size | None = None
    samples: Count = 4
    temperature: Positive = 1.0
    max_tokens: Size = 1024
    max_prompt_length: Size = 512
    max_num_seqs: Size = 256
    dtype: str = "bfloat16"
    kv_cache_gib: Size = 4
    tensor_parallel_size: Size = 1
    seed: int = 1
    emulate_npu: bool = False
    # keyword arguments of `HardwareErrorMode` besides the seed
    hardware_error: dict[str, Any] | None = None
    quantization: Quantization | None = None  # of the linear layers

    @property
    def is_modelled(self) -> bool:
        """True if layers compute what vLLM has no kernels for."""
        return bool(self.hardware_error or self.quantization)


def of_run(path: str, **given: Any) -> EvaluationJob:
    """The evaluation of a run's checkpoint (the last one, if no step is given) as the run itself
    evaluates, but for what is `given`.
    """
    run = RunDirectory.open(path)
    if "step" not in given:
        steps = whole_checkpoints(run.checkpoints_dir)
        if not steps:
            raise ConfigError(
                f"{path} has no checkpoint: give the step 0 for the model before training, or save "
                "some (megatron_training.save_interval)"
            )
        given["step"] = max(steps)
    recipe, _ = read(run.config())
    upstream = recipe.engine == "mindspeed_rl"
    if upstream and not recipe.model.load:
        raise ConfigError(
            f"{path}/config.yaml has no actor_config.load: the base weights were random and are "
            "not kept, so its adapters fit no model"
        )
    files: dict[str, Path | str] = {} if "data" in given else {"test": recipe.task.test_file}
    if "model" not in given and Path(recipe.model.path).is_dir():
        files |= model_files(recipe.model.path)
    if "verifier" not in given:
        files |= own_code(recipe.task.verifier_function[:1])
    if changed := run.other_data(files):
        raise ConfigError(
            f"{path} has seen other files than are there now. Put them back, or give --model, "
            "--data or --verifier to evaluate with others\n" + "\n".join(changed)
        )
    values = dict(
        evaluation_settings(recipe),
        temperature=recipe.evaluation.temperature or 1.0,
        model=recipe.model.path,
        data=recipe.task.test_file,
        run=str(path),
        chat_template_kwargs=recipe.task.chat_template_kwargs,
        problems=recipe.evaluation.n_problems,
        max_prompt_length=recipe.sampling.max_prompt_length,
        max_num_seqs=recipe.rollout.max_num_seqs,
        seed=run.status()["seed"],
    )
    if upstream:
        values["tensor_parallel_size"] = recipe.layout.infer_tp
        values["emulate_npu"] = recipe.emulate_npu
    return EvaluationJob(**values | given)


def evaluate(job: EvaluationJob, output: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Write the evaluation `job` into the new folder `output`; returns what summary.json says.
    `tell` gets a line at each stage. ValueError or OSError: something that was given cannot be
    read, does not fit, or is there already.
    """
    if output.exists():
        raise FileExistsError(
            f"{output} exists: an evaluation is written once. Choose another name, or remove it"
        )
    _prepare_platform(job)
    tokenizer = load_tokenizer(job.model)
    started = RunDirectory.open(job.run).started if job.run else None
    task = Prompts(
        job.data,
        tokenizer,
        job.prompt,
        job.max_prompt_length,
        job.problems,
        started,
        job.chat_template_kwargs,
    )
    for warning in try_rewards([(job.verifier, 1.0)], task.rows):
        tell(f"warning: {warning}")
    if task.dropped:
        tell(task.left_out("evaluation"))
    kinds = {"greedy": (1, 0.0)}
    step = job.step or 0
    if job.samples:
        kinds["sampled"] = (job.samples, job.temperature)
    with tempfile.TemporaryDirectory(prefix="qerl_merged_") as folder:
        model = _merged(job, Path(folder) / "model", tell)
        tell("starting vLLM")
        sample = _sampler(job, model)
        summary = asdict(job)
        written = {}
        for name, (n, temperature) in kinds.items():
            kind = f"{n} samples each at temperature {temperature:g}" if temperature else "greedy"
            tell(f"{len(task.rows)} questions, {kind}")
            seed = derived_seed(job.seed, f"evaluation {name}", step)
            sampling = sampling_of(tokenizer, job.max_tokens, temperature)
            answers = sample(task.prompts, n, seed, sampling)
            texts = decoded(tokenizer, answers)
            truncated = [answer.is_truncated for answer in answers]
            summary[name], written[name] = evaluate_answers(
                task.rows, texts, truncated, n, job.verifier
            )
    with new_directory(output) as making:
        for name, rows in written.items():
            file = "answers.jsonl" if name == [*written][-1] else f"{name}.jsonl"
            append_rows(making / file, step, rows)
        (making / "summary.json").write_text(json_text(summary), encoding="utf-8")
    return summary


def _prepare_platform(job: EvaluationJob) -> None:
    """Enters the emulated NPU, if it is to serve, before vLLM asks for its platform; ConfigError
    where this machine's vLLM cannot serve.
    """
    if job.emulate_npu and not job.is_modelled:
        if importlib.util.find_spec("vllm_ascend") is None:
            raise ConfigError(
                "emulate_npu: vllm_ascend cannot be imported. Put upstream's checkouts on "
                "PYTHONPATH (docs/architecture.md), or serve with this machine's own vLLM: "
                "--no-emulate-npu"
            )
        emulation.enter(job.tensor_parallel_size)
    from vllm.platforms import current_platform

    is_shared = job.tensor_parallel_size > 1
    if job.is_modelled and (is_shared or job.emulate_npu or current_platform.device_name == "npu"):
        raise ConfigError(
            "quantized layers and errors of other hardware are modelled in one process of vLLM for "
            "CPUs: give --tensor-parallel-size 1, add --no-emulate-npu, or leave them out "
            "(--quantization none)"
        )
    if current_platform.is_cpu() and (faults := beyond_kernels(read_shape(job.model))):
        raise ConfigError(*(f"{job.model}/config.json: {fault}" for fault in faults))


def _merged(job: EvaluationJob, folder: Path, tell: Callable[[str], None]) -> str:
    """The Hugging Face directory of what is evaluated; adapters are merged into `folder`."""
    import torch

    from mindspeed_qerl.lora.export import save_merged

    from .checkpoint import load_adapters

    if not job.run or job.step == 0:
        return job.model
    run = RunDirectory.open(job.run)
    adapters = load_adapters(run.checkpoints_dir, job.model, job.step)
    run.check_owner(run.checkpoints_dir / f"iter_{adapters.iteration:07d}", adapters.run)
    tell(f"merging {len(adapters.weights):,} adapters into {job.model}")
    # what vLLM would round to its dtype by itself, it would round to nearest
    share = save_merged(adapters, job.model, folder, dtype=getattr(torch, job.dtype))
    tell(f"{share:.2%} of their update is in the merged weights, {job.dtype}")
    return str(folder)


def _sampler(job: EvaluationJob, model: str) -> Callable:
    """(prompts, n, seed, keyword arguments of vLLM's SamplingParams) -> n answers to each prompt."""
    from vllm.platforms import current_platform

    from .rollout import RolloutEngine, RolloutRequest
    from .serving import complete, start_vllm

    length = job.max_prompt_length + job.max_tokens
    sizes = (job.dtype, length, job.max_num_seqs, job.kv_cache_gib)
    if job.is_modelled:
        engine = RolloutEngine(model, *sizes, quantization=job.quantization)
        request = partial(RolloutRequest, hardware_error=job.hardware_error, trained=False)
        return lambda *asked: engine.generate(request(*asked))[0]
    if job.tensor_parallel_size == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    is_npu = current_platform.device_name == "npu"
    # vLLM cannot take back the draw of a prompt that it has cut where the generator is a CPU's
    more: dict = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, length)}
    if is_npu:  # as MindSpeed-RL starts it (vllm_engine.py:177, 208)
        scheduler = {"ascend_scheduler_config": {"enabled": True}, "refresh": True}
        more = {"additional_config": scheduler}
    llm = start_vllm(
        model,
        *sizes,
        share_prompts=not is_npu,
        tensor_parallel_size=job.tensor_parallel_size,
        seed=job.seed,
        **more,
    )
    return lambda prompts, n, seed, sampling: complete(
        llm, prompts, use_tqdm=True, logprobs=False, n=n, seed=seed, **sampling
    )
