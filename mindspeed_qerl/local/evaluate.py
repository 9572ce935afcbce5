"""Evaluate a model, an adapter, or a checkpoint of a run on the rows of a task: greedily, and with several samples.

One folder for each evaluation, in a run RUN/evaluations/<name>/:

    summary.json     what was evaluated and how; "greedy" and "sampled": the numbers of tasks/evaluation.py
    answers.jsonl    one row per question, as in eval_answers.jsonl: the samples, or without any the greedy answers
    greedy.jsonl     the greedy answers, if there are samples as well
"""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.files import checkpoint_iterations
from mindspeed_qerl.recipe.reader import read
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.seeds import derived_seed
from mindspeed_qerl.tasks.evaluation import evaluate_answers
from mindspeed_qerl.tasks.prompts import Prompts
from mindspeed_qerl.tasks.rewards import is_reward, load_reward, try_reward


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, and how.

    Attributes:
        model: Hugging Face directory. adapter: a PEFT adapter for it; run, step: or the adapters of a run's
            checkpoint.
        data: file of rows (tasks/rows.py). prompt: "chat" or "plain". problems: the first so many, None for all.
        verifier: name or import path of a reward (tasks/rewards.py).
        samples: answers per question at `temperature`, 0 for greedy answers only.
        hardware_error: keyword arguments of `HardwareErrorMode` besides the seed, or None.

    Raises:
        ConfigError: a value is out of its range.
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
    hardware_error: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("problems", 1), ("samples", 0), ("max_tokens", 1), ("max_prompt_length", 1),
                            ("max_num_seqs", 1), ("kv_cache_gib", 1), ("tensor_parallel_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value} must be at least {least}")
        if self.samples and self.temperature <= 0:
            raise ConfigError(
                f"temperature = {self.temperature} must be above 0; for greedy answers alone, ask for 0 samples")
        load_reward(self.verifier)
        if self.hardware_error:
            if self.tensor_parallel_size > 1:
                raise ConfigError(
                    "errors of other hardware are modelled in one process only: leave out --tensor-parallel-size")
            if not 0 < self.hardware_error.get("gaussian_std", 0.05) < 1 or self.hardware_error.get("block", 64) < 1:
                raise ConfigError(f"hardware_error = {self.hardware_error}: gaussian_std must be between 0 and 1, and "
                                  "block at least 1")


def of_run(path: str, **given: Any) -> Evaluation:
    """The evaluation of a run's checkpoint (the last one, if no step is given) as the run itself evaluates, but for
    what is `given`."""
    run = RunDirectory.open(path)
    if "step" not in given:
        there = checkpoint_iterations(run.checkpoints_dir)
        if not there:
            raise ConfigError(f"{path} has no checkpoint: give the step 0 for the model before training, or save some "
                              "(megatron_training.save_interval)")
        given["step"] = max(there)
    recipe, _ = read(run.config())  # of a run of another version, too: what it does not say has its default
    if not recipe.model.path or not recipe.task.test_file:
        raise ConfigError(f"{path}/config.yaml does not say megatron_training.tokenizer_name_or_path and "
                          "task.test_file: give --model, --data and --adapter instead of --run")
    asked = recipe.evaluation
    samples = ({"samples": asked.samples_per_problem, "temperature": asked.temperature}
               if asked.temperature else {"samples": 0})
    values = dict(
        model=recipe.model.path, data=recipe.task.test_file, run=str(path), prompt=recipe.task.prompt,
        verifier=next(filter(is_reward, (name for name, _ in recipe.task.verifiers)), "gsm8k"),
        problems=asked.n_problems, **samples, max_tokens=recipe.sampling.max_tokens,
        max_prompt_length=recipe.sampling.max_prompt_length, max_num_seqs=recipe.rollout.max_num_seqs,
        dtype=recipe.model.dtype, seed=run.status()["seed"],
        hardware_error=recipe.hardware_error.arguments("evaluation"))
    return Evaluation(**values | given)


def evaluate(what: Evaluation, output: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Write the evaluation `what` into the new folder `output`; returns what summary.json says. `tell` gets a line at
    each stage.

    Raises:
        ConfigError, ValueError, OSError: something that was given cannot be read or does not fit, or `output` is there
        already.
    """
    from transformers import AutoTokenizer

    if output.exists():
        raise FileExistsError(f"{output} exists: an evaluation is written once. Choose another name, or remove it")
    tokenizer = AutoTokenizer.from_pretrained(what.model)
    task = Prompts(what.data, tokenizer, what.prompt, what.max_prompt_length, what.problems)
    try_reward(what.verifier, task.rows)
    if task.dropped:
        tell(task.left_out("evaluation"))
    with tempfile.TemporaryDirectory(prefix="qerl_merged_") as folder:
        model, step = _merged(what, Path(folder) / "model", tell)
        tell("starting vLLM")
        answer = _answerer(what, model, tokenizer)
        summary: dict[str, Any] = {**asdict(what), "step": step}
        written = {}
        for name, n, temperature in (("greedy", 1, 0.0), ("sampled", what.samples, what.temperature)):
            if n:
                tell(f"{len(task.rows)} questions, "
                     f"{'greedy' if not temperature else f'{n} samples each at temperature {temperature:g}'}")
                texts, truncated = answer(task.prompts, n, temperature,
                                          derived_seed(what.seed, f"evaluation {name}", step or 0))
                summary[name], written[name] = evaluate_answers(task.rows, texts, truncated, n, what.verifier)
    output.mkdir(parents=True)
    for file, name in (("answers.jsonl", "sampled" if what.samples else "greedy"),
                       *([("greedy.jsonl", "greedy")] if what.samples else [])):
        (output / file).write_text("".join(json.dumps({"step": step or 0, **row}) + "\n" for row in written[name]),
                                   encoding="utf-8")
    (output / "summary.json").write_text(json.dumps(summary, indent=2, default=float) + "\n", encoding="utf-8")
    return summary


def _merged(what: Evaluation, folder: Path, tell: Callable[[str], None]) -> tuple[str, int | None]:
    """(Hugging Face directory of what is evaluated, the step it is from); adapters are merged into `folder`."""
    from mindspeed_qerl.local import checkpoint as local
    from mindspeed_qerl.lora import checkpoint as upstream
    from mindspeed_qerl.lora.export import load_peft, save_merged

    if what.run and what.step != 0:
        checkpoints = RunDirectory.open(what.run).checkpoints_dir
        of_local_engine = any(checkpoints.glob(f"iter_*/{local.STATE}"))
        adapters = (local if of_local_engine else upstream).load_adapters(checkpoints, what.step)
    elif what.adapter:
        adapters = load_peft(what.adapter)
    else:
        return what.model, what.step
    tell(f"merging {len(adapters.weights):,} adapters into {what.model}")
    save_merged(adapters, what.model, folder, all_layers=not what.adapter)
    return str(folder), adapters.iteration if what.run else what.step


def _answerer(what: Evaluation, model: str, tokenizer: Any) -> Callable:
    """(prompts, n, temperature, seed) -> (texts, truncated), n answers for each prompt in order."""
    from mindspeed_qerl.local.rollout import RolloutEngine, complete, start_vllm

    sizes = (model, what.dtype, what.max_prompt_length + what.max_tokens, what.max_num_seqs, what.kv_cache_gib)
    if what.hardware_error:
        engine = RolloutEngine(*sizes)
    else:
        if what.tensor_parallel_size == 1:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        llm = start_vllm(*sizes, tensor_parallel_size=what.tensor_parallel_size, seed=what.seed)
    stop = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def answer(prompts: list[list[int]], n: int, temperature: float, seed: int) -> tuple[list[str], list[bool]]:
        sampling = dict(max_tokens=what.max_tokens, temperature=temperature, stop_token_ids=stop)
        if what.hardware_error:
            completions, _ = engine.generate(prompts, n, seed, sampling, hardware_error=what.hardware_error)
        else:
            completions = complete(llm, prompts, use_tqdm=True, n=n, seed=seed, **sampling)
        flat = [completion for group in completions for completion in group]
        return tokenizer.batch_decode([one.token_ids for one in flat],
                                      skip_special_tokens=True), [one.truncated for one in flat]

    return answer
