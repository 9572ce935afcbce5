"""Evaluate a model, an adapter, or a checkpoint of a run on the rows of a task: greedily, and with
several samples.

One folder for each evaluation, in a run RUN/evaluations/<name>/:

    summary.json     what was evaluated and how; "greedy" and "sampled": the numbers of
    tasks/evaluation.py answers.jsonl    one row per question, as in eval_answers.jsonl: the
    samples, or without any the greedy answers greedy.jsonl     the greedy answers, if there are
    samples as well
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_qerl import emulation
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import json_text, new_directory, whole_checkpoints
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.local.limits import BESIDE_ROUNDED
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.recipe.types import Quantization
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.prompts import Prompts, load_tokenizer
from mindspeed_qerl.tasks.rewards import first_reward, load_reward, try_rewards

# the least value of what has one
LEAST = {
    "step": 0,
    "problems": 1,
    "samples": 0,
    "max_tokens": 1,
    "max_prompt_length": 1,
    "max_num_seqs": 1,
    "kv_cache_gib": 1,
    "tensor_parallel_size": 1,
}


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how: `model` with `adapter`, or with the adapters of a run's
    checkpoint. ConfigError if a value is out of its range. tools/evaluate.py describes each.
    """

    model: str
    data: str
    adapter: str | None = None
    run: str | None = None
    step: int | None = None
    prompt: str = "chat"
    verifier: str = "gsm8k"
    problems: int | None = None
    samples: int = 4
    temperature: float = 1.0
    max_tokens: int = 1024
    max_prompt_length: int = 512
    max_num_seqs: int = 256
    dtype: str = "bfloat16"
    kv_cache_gib: int = 4
    tensor_parallel_size: int = 1
    seed: int = 1
    emulate_npu: bool = False
    # keyword arguments of `HardwareErrorMode` besides the seed
    hardware_error: dict[str, Any] | None = None
    quantization: Quantization | None = None  # of the linear layers

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}")
        if self.samples and self.temperature <= 0:
            raise ConfigError(
                f"temperature = {self.temperature} must be above 0; for greedy answers alone, give "
                "0 samples"
            )
        load_reward(self.verifier)
        if self.modelled and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"{self.modelled} are modelled in one process only: give --tensor-parallel-size 1"
            )
        if self.modelled and self.emulate_npu:
            raise ConfigError(
                f"{self.modelled} are modelled on vLLM for CPUs: add --no-emulate-npu"
            )
        if self.is_beside and self.dtype != "float32":
            raise ConfigError(
                f"quantization.lora = 'beside' with dtype = {self.dtype}: {BESIDE_ROUNDED} Give "
                "--dtype float32, or --quantization-lora merged"
            )
        sizes = self.hardware_error or {}
        if not 0 < sizes.get("gaussian_std", 0.05) < 1 or sizes.get("block", 64) < 1:
            raise ConfigError(
                f"hardware_error = {sizes}: gaussian_std must be between 0 and 1, and block at "
                "least 1"
            )

    @property
    def modelled(self) -> str:
        """What layers do that is only modelled, and how to leave it out; "": nothing."""
        if self.hardware_error:
            return "errors of other hardware"
        return "quantised layers (leave them out: --quantization none)" if self.quantization else ""

    @property
    def is_beside(self) -> bool:
        """Whether the base is quantised and the adapter is not."""
        return self.quantization is not None and self.quantization.lora == "beside"


def of_run(path: str, **given: Any) -> Evaluation:
    """The evaluation of a run's checkpoint (the last one, if no step is given) as the run itself
    evaluates, but for what is `given`; of a quantization what is not given is the run's.
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
    if not recipe.model.path or not recipe.task.test_file:
        raise ConfigError(
            f"{path}/config.yaml does not say megatron_training.tokenizer_name_or_path and "
            "task.test_file: give --model, --data and --adapter instead of --run"
        )
    upstream = recipe.engine == "mindspeed_rl"
    if upstream and not recipe.model.load:
        raise ConfigError(
            f"{path}/config.yaml has no actor_config.load: the base weights were random and are "
            "not kept, so its adapters fit no model"
        )
    files: dict[str, Path | str] = {} if "data" in given else {"test": recipe.task.test_file}
    if "model" not in given and Path(recipe.model.path).is_dir():
        files |= model_files(recipe.model.path)
    if changed := run.other_data(files):
        raise ConfigError(
            f"{path} has seen other files than are there now. Put them back, or give --model and "
            "--data to evaluate with others\n" + "\n".join(changed)
        )
    if given.get("quantization"):
        given["quantization"] = replace(recipe.quantization, **given["quantization"])
    settings = recipe.evaluation
    values: dict[str, Any] = {"samples": 0}
    if settings.temperature:
        values = {"samples": settings.samples_per_problem, "temperature": settings.temperature}
    if recipe.quantization.enabled and recipe.quantization.evaluation:
        values["quantization"] = recipe.quantization
    if upstream:
        values["tensor_parallel_size"] = recipe.layout.infer_tp
        values["emulate_npu"] = recipe.emulate_npu
    values |= dict(
        model=recipe.model.path,
        data=recipe.task.test_file,
        run=str(path),
        prompt=recipe.task.prompt,
        verifier=first_reward(recipe.task.verifiers),
        problems=settings.n_problems,
        max_tokens=recipe.sampling.max_tokens,
        max_prompt_length=recipe.sampling.max_prompt_length,
        max_num_seqs=recipe.rollout.max_num_seqs,
        dtype=recipe.model.dtype,
        seed=run.status()["seed"],
        hardware_error=recipe.hardware_error.arguments("evaluation"),
    )
    return Evaluation(**values | given)


def evaluate(what: Evaluation, output: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Write the evaluation `what` into the new folder `output`; returns what summary.json says.
    `tell` gets a line at each stage. ValueError or OSError: something that was given cannot be
    read, does not fit, or is there already.
    """
    if output.exists():
        raise FileExistsError(
            f"{output} exists: an evaluation is written once. Choose another name, or remove it"
        )
    _prepare_platform(what)
    tokenizer = load_tokenizer(what.model)
    started = RunDirectory.open(what.run).started if what.run else None
    task = Prompts(
        what.data, tokenizer, what.prompt, what.max_prompt_length, what.problems, at=started
    )
    try_rewards([(what.verifier, 1.0)], task.rows)
    if task.dropped:
        tell(task.left_out("evaluation"))
    kinds = {"greedy": (1, 0.0)}
    if what.samples:
        kinds["sampled"] = (what.samples, what.temperature)
    with tempfile.TemporaryDirectory(prefix="qerl_merged_") as folder:
        model, step = _merged(what, Path(folder) / "model", tell)
        tell("starting vLLM")
        sample = _sampler(what, model, tokenizer)
        summary: dict[str, Any] = {**asdict(what), "step": step}
        written = {}
        for name, (n, temperature) in kinds.items():
            kind = f"{n} samples each at temperature {temperature:g}" if temperature else "greedy"
            tell(f"{len(task.rows)} questions, {kind}")
            seed = derived_seed(what.seed, f"evaluation {name}", step or 0)
            answers, tokens = [], []
            for group in sample(task.prompts, n, temperature, seed):
                answers += group
                tokens += [answer.token_ids for answer in group]
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            truncated = [answer.truncated for answer in answers]
            summary[name], written[name] = evaluate_answers(
                task.rows, texts, truncated, n, what.verifier
            )
    with new_directory(output) as making:
        for name, rows in written.items():
            file = "answers.jsonl" if name == [*written][-1] else f"{name}.jsonl"
            lines = [json.dumps({"step": step or 0, **row}, allow_nan=False) for row in rows]
            (making / file).write_text("\n".join([*lines, ""]), encoding="utf-8")
        (making / "summary.json").write_text(json_text(summary), encoding="utf-8")
    return summary


def _prepare_platform(what: Evaluation) -> None:
    """The emulated NPU, if it is to serve; ConfigError where this machine's vLLM cannot."""
    if what.emulate_npu:
        if importlib.util.find_spec("vllm_ascend") is None:
            raise ConfigError(
                "emulate_npu: vllm_ascend cannot be imported. Put upstream's checkouts on "
                "PYTHONPATH (docs/architecture.md), or serve with this machine's own vLLM: "
                "--no-emulate-npu"
            )
        emulation.enter(what.tensor_parallel_size)
    elif what.modelled and _is_npu():
        raise ConfigError(
            f"{what.modelled} are modelled on vLLM for CPUs, and this machine's is for NPUs"
        )


def _is_npu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.device_name == "npu"


def _merged(what: Evaluation, folder: Path, tell: Callable[[str], None]) -> tuple[str, int | None]:
    """(Hugging Face directory of what is evaluated, the step it is from); adapters are merged into
    `folder`.
    """
    import torch

    from mindspeed_qerl.local.checkpoint import load_adapters
    from mindspeed_qerl.lora.export import load_peft, save_merged

    if what.run and what.step != 0:
        run = RunDirectory.open(what.run)
        adapters = load_adapters(run.checkpoints_dir, what.step)
        run.check_owner(run.checkpoints_dir / f"iter_{adapters.iteration:07d}", adapters.run)
    elif what.adapter:
        adapters = load_peft(what.adapter)
    else:
        return what.model, what.step
    tell(f"merging {len(adapters.weights):,} adapters into {what.model}")
    # a run in float32 samples by weights in float32, whatever the files of its model have
    save_merged(
        adapters,
        what.model,
        folder,
        all_layers=not what.adapter,
        dtype=torch.float32 if what.dtype == "float32" else None,
    )
    return str(folder), adapters.iteration if what.run else what.step


def _sampler(what: Evaluation, model: str, tokenizer: Any) -> Callable:
    """(prompts, n, temperature, seed) -> n completions for each prompt."""
    from mindspeed_qerl.families.checkpoint import Checkpoint
    from mindspeed_qerl.local.rollout import RolloutEngine
    from mindspeed_qerl.local.serving import complete, start_vllm

    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    common: dict[str, Any] = dict(max_tokens=what.max_tokens, stop_token_ids=stop, logprobs=None)
    length = what.max_prompt_length + what.max_tokens
    sizes = (what.dtype, length, what.max_num_seqs, what.kv_cache_gib)
    if what.modelled:
        engine = RolloutEngine(
            what.model if what.is_beside else model, *sizes, quantization=what.quantization
        )
        if what.is_beside:  # the base is quantised, and what is merged is synced
            merged = Checkpoint(model)
            engine.start_sync()
            engine.load_tensors((name, merged.read(name)) for name in merged.files)
            engine.finish_sync()

        def sample(prompts: Any, n: int, temperature: float, seed: int) -> Any:
            sampling = common | {"temperature": temperature}
            return engine.generate(prompts, n, seed, sampling, hardware_error=what.hardware_error)[
                0
            ]

        return sample
    if what.tensor_parallel_size == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    npu = _is_npu()
    more: dict[str, Any]
    if npu:  # as MindSpeed-RL starts it (vllm_engine.py:177, 208)
        scheduler = {"ascend_scheduler_config": {"enabled": True}, "refresh": True}
        more = {"additional_config": scheduler}
    # vLLM cannot take back the draw of a prompt that it has cut where the generator is a CPU's
    else:
        more = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, length)}
    llm = start_vllm(
        model,
        *sizes,
        share_prompts=not npu,
        tensor_parallel_size=what.tensor_parallel_size,
        seed=what.seed,
        **more,
    )
    return lambda prompts, n, temperature, seed: complete(
        llm, prompts, use_tqdm=True, n=n, seed=seed, temperature=temperature, **common
    )
