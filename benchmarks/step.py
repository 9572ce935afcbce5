"""Seconds per GRPO step: our local engine beside TRL's GRPOTrainer, on the same model, prompts and
cores, in one run.

    # two sizes, two rounds of 2 + 5 steps, about 20 minutes
    python benchmarks/step.py
    python benchmarks/step.py --size smollm2 --rounds 1    # needs `make real-model`
    python benchmarks/step.py --size large --prompts 32 --rounds 1
    # ours alone, by who has a draw of the noise
    python benchmarks/step.py --size large --draws

    tiny    the quickstart: 0.5M parameters, 32 prompts x 8 answers of 24 tokens
    large   10M parameters, 8 prompts x 8 answers of 256 tokens
    smollm2 SmolLM2-135M-Instruct, 4 prompts x 8 answers of 48 tokens

Both sides: the same Qwen3-MoE with random weights or SmolLM2, float32, 2 cores, LoRA r=32 alpha=64
on attention and MLP or all experts, AdamW 2e-4, no KL term, one update per step, the same prompts
in the same order, the same reward (digits), answers of exactly the same length (nothing ends an
answer early). Ours is `cli/train_grpo.py` as anyone starts it: vLLM and two Megatron ranks in
processes of their own, noise (AQN) on, logprobs kept, metrics written. TRL samples with
transformers in the process that trains, with `grouped_mm` experts, without gradient checkpointing,
autocast, load-balancing loss or saving. "TRL, merged" samples with the adapters merged into the
weights (PEFT's merge_adapter), as we do; "TRL, vLLM" with vLLM in the process that trains, in
bfloat16, as TRL starts it, without the correction that costs it another forward: timed alone, since
on a CPU its samples may be of stale weights, with vLLM's linear layers unpacked and of SmolLM2
alone, since its sync fails where vLLM has packed layers or experts ('Parameter' object has no
attribute 'weight_loader'). They take turns, each in fresh processes; the first steps are not
counted, the rest give medians. OMP_WAIT_POLICY is PASSIVE for all unless it is set: threads that
spin for a core another program has taken slow TRL twentyfold.

    rollout    sampling the answers; TRL also decodes them here
    reward     verifier, advantages and the batch
    training   forward, backward and optimizer
    sync       merged weights into vLLM; transformers samples from the weights it trains
    other      on our side the hop to the ranks and back
    once       everything outside the steps: imports, engines, our first evaluation, shutdown
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

REPO = Path(__file__).resolve().parents[1]
CORES = 2
GROUP = 8  # answers per prompt
SEED = 1
LEARNING_RATE = 2e-4
MAX_PROMPT_TOKENS = 96
PARTS = ("rollout", "reward", "training", "sync", "other")


@dataclass(frozen=True)
class Setting:
    """What both sides run. Micro-batches count answers; None is all of them at once."""

    shape: str
    prompts: int
    tokens: int
    our_micro_batch: int
    trl_micro_batch: int | None = None
    warm_up: int = 2
    steps: int = 5

    @property
    def answers(self) -> int:
        return self.prompts * GROUP


@dataclass(frozen=True)
class Measured:
    """One run of one side: per counted step the seconds of each part and of the whole, answer
    lengths, rewards.
    """

    steps: list[dict[str, float]]
    once_seconds: float
    load: float


SIZES = {
    "tiny": Setting("tiny", prompts=32, tokens=24, our_micro_batch=64),
    "large": Setting("large", prompts=8, tokens=256, our_micro_batch=16, trl_micro_batch=16),
    "smollm2": Setting(
        "smollm2", prompts=4, tokens=48, our_micro_batch=8, trl_micro_batch=8, warm_up=1, steps=3
    ),
}
SMOLLM2 = REPO / "models" / "smollm2_135m_instruct"


def digits(responses: list[str], answers: list[str], rows: list[dict]) -> list[float]:
    """A reward that differs between the answers of any model."""
    return [float(sum(map(str.isdigit, response))) for response in responses]


def make_model(directory: Path, shape: str) -> int:
    """Random weights, or a link to SmolLM2's, the quickstart's problems and no end token: every answer
    gets all its tokens. Returns the number of parameters. SystemExit: SmolLM2 was not made.
    """
    from transformers import AutoTokenizer

    from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model

    if shape == "smollm2":
        if not SMOLLM2.is_dir():
            raise SystemExit(f"there is no {SMOLLM2}: make real-model")
        shutil.copytree(SMOLLM2, directory, ignore=lambda *_: ["model.safetensors"])
        (directory / "model.safetensors").symlink_to(SMOLLM2 / "model.safetensors")
        shutil.copytree(REPO / "models" / "tiny_qwen3_moe" / "data", directory / "data")
        parameters = 134_515_008
    else:
        parameters = make_tiny_model(directory, ModelRecipe(shape=shape, steps=0))["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((directory / name).read_text()) | {"eos_token_id": None}
        (directory / name).write_text(json.dumps(content, indent=2))
    return parameters


def our_overrides(setting: Setting, model_dir: Path) -> list[str]:
    """What the quickstart's config is changed to."""
    return [
        f"megatron_training.tokenizer_name_or_path={model_dir}",
        f"megatron_training.global_batch_size={setting.prompts}",
        f"megatron_training.train_iters={setting.warm_up + setting.steps}",
        f"megatron_training.seed={SEED}",
        f"actor_config.lr={LEARNING_RATE}",
        f"actor_config.micro_batch_size={setting.our_micro_batch}",
        f"rl_config.mini_batch_size={setting.prompts}",
        f"rl_config.n_samples_per_prompt={GROUP}",
        f"rl_config.max_prompt_length={MAX_PROMPT_TOKENS}",
        *(["actor_config.expert_model_parallel_size=1"] if setting.shape == "smollm2" else []),
        "rl_config.verifier_function=[benchmarks.step:digits]",
        f"generate_config.sampling_config.max_tokens={setting.tokens}",
        f"generate_config.max_model_len={MAX_PROMPT_TOKENS + setting.tokens}",
    ]


def run_ours(
    setting: Setting, model_dir: Path, work: Path, draws: str = "step"
) -> list[dict[str, float]]:
    """The steps of `cli/train_grpo.py`, from its metrics.jsonl; draws: `aqn.draws`."""
    root = Path(tempfile.mkdtemp(prefix="ours_", dir=work))
    command = [
        sys.executable,
        REPO / "cli" / "train_grpo.py",
        "--config-name",
        "grpo_tiny_moe_cpu",
        *our_overrides(setting, model_dir),
        f"aqn.draws={draws}",
        "eval.n_problems=1",
        "eval.samples_per_problem=1",
        "eval.every=1000",
        f"run.root={root}",
        "run.name=step",
    ]
    with open(root / "output.log", "w") as log:
        code = subprocess.run(
            command, check=False, cwd=REPO, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise RuntimeError(
            "cli/train_grpo.py ended with exit code "
            f"{code}:\n{(root / 'output.log').read_text()[-3000:]}"
        )
    rows = [
        json.loads(line)
        for line in next(root.glob("step/*/metrics.jsonl")).read_text().splitlines()
    ]
    return [
        {
            "rollout": row["time/rollout"],
            "reward": row["time/reward"],
            "training": row["time/logprobs"] + row["time/update"],
            "sync": row["time/sync"],
            "step": row["time/step"],
            "length": row["response/length_mean"],
            "gradient": row["grad_norm"],
        }
        for row in rows
    ]


def run_trl(setting: Setting, model_dir: Path, work: Path, sampler: str) -> list[dict[str, float]]:
    """The steps of TRL's GRPOTrainer. It samples with transformers, adapters "beside" the weights
    or "merged" into them, or with "vllm"; call in a fresh process, its output goes to a file in
    `work`.
    """
    log = os.open(work / "trl.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from mindspeed_qerl.local.batch import PromptOrder
    from mindspeed_qerl.tasks.rows import read_rows

    torch.set_num_threads(CORES)
    if sampler == "vllm":
        from mindspeed_qerl.integrations.cpu import keep_weights

        keep_weights()
    rows = read_rows(model_dir / "data" / "train_chat.parquet")
    chosen = PromptOrder(len(rows), SEED).take((setting.warm_up + setting.steps) * setting.prompts)
    dataset = Dataset.from_dict({"prompt": [rows[i].prompt for i in chosen]})
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = None
    if setting.shape == "smollm2":
        targets += ["gate_proj", "up_proj", "down_proj"]
    else:
        model.set_experts_implementation("grouped_mm")
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(
        r=32, lora_alpha=64, lora_dropout=0.0, target_modules=targets, target_parameters=experts
    )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_special_tokens(
        {"eos_token": "<never>"}
    )  # TRL wants one; it is beyond the model's vocabulary
    micro_batch = setting.trl_micro_batch or setting.answers
    arguments = GRPOConfig(
        output_dir=str(work / "trl"),
        max_steps=setting.warm_up + setting.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=setting.answers // micro_batch,
        num_generations=GROUP,
        max_completion_length=setting.tokens,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        router_aux_loss_coef=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        use_vllm=sampler == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=MAX_PROMPT_TOKENS + setting.tokens,
        vllm_importance_sampling_correction=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        seed=SEED,
    )

    seconds, steps = {"sync": 0.0}, []

    class Timed(GRPOTrainer):
        def _generate(self, *given, **named):
            started = time.perf_counter()
            if sampler == "merged":
                self.model.merge_adapter()
            result = super()._generate(*given, **named)
            if sampler == "merged":
                self.model.unmerge_adapter()
            seconds["rollout"] = time.perf_counter() - started - seconds["sync"]
            return result

        def _generate_and_score_completions(self, *given, **named):
            started = time.perf_counter()
            result = super()._generate_and_score_completions(*given, **named)
            seconds["scored"] = time.perf_counter() - started
            return result

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__):
            step = time.perf_counter() - self.started
            steps.append(
                {
                    "rollout": seconds["rollout"],
                    "reward": seconds["scored"] - seconds["rollout"] - seconds["sync"],
                    "training": step - seconds["scored"],
                    "sync": seconds["sync"],
                    "step": step,
                }
            )

        def on_log(self, _, __, ___, logs, **____):
            if "completions/mean_length" in logs:
                steps[-1] |= {
                    "length": logs["completions/mean_length"],
                    "gradient": logs["grad_norm"],
                }

    trainer = Timed(
        model=model,
        processing_class=tokenizer,
        args=arguments,
        train_dataset=dataset,
        reward_funcs=lambda completions, **_: digits(completions, [], []),
        peft_config=lora,
        callbacks=[Clock()],
    )
    if sampler == "vllm":
        sync_weights = trainer.vllm_generation.sync_weights

        def timed_sync():
            started = time.perf_counter()
            sync_weights()
            seconds["sync"] = time.perf_counter() - started

        trainer.vllm_generation.sync_weights = timed_sync
    trainer.train()
    return steps


def run_trl_process(
    setting: Setting, model_dir: Path, work: Path, sampler: str
) -> list[dict[str, float]]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(run_trl, setting, model_dir, work, sampler).result()
        except Exception as error:
            raise RuntimeError(
                f"TRL's side failed, {type(error).__name__}: "
                f"{error}\n{(work / 'trl.log').read_text()[-3000:]}"
            ) from error


SIDES = {
    "ours": run_ours,
    "TRL": partial(run_trl_process, sampler="beside"),
    "TRL, merged": partial(run_trl_process, sampler="merged"),
    "TRL, vLLM": partial(run_trl_process, sampler="vllm"),
    "draws=group": partial(run_ours, draws="group"),
    "draws=answer": partial(run_ours, draws="answer"),
}


def measure(side: str, setting: Setting, model_dir: Path, work: Path) -> Measured:
    """Run one side once; RuntimeError if it fails or did other work than it was asked for."""
    started = time.perf_counter()
    rows = SIDES[side](setting, model_dir, work)
    once = time.perf_counter() - started - sum(row["step"] for row in rows)
    if not any(row["gradient"] > 0 for row in rows):
        raise RuntimeError(
            f"{side}: no step had a gradient, all rewards were equal; use more --prompts"
        )
    for row in rows:
        row["other"] = row["step"] - sum(row[part] for part in PARTS if part != "other")
    return Measured(rows[setting.warm_up :], once, os.getloadavg()[0])


def report(setting: Setting, parameters: int, runs: dict[str, list[Measured]], console) -> None:
    from rich.table import Table

    def median(side: str, key: str) -> float:
        return statistics.median(step[key] for run in runs[side] for step in run.steps)

    rounds = len(runs["ours"])
    others = [side for side in runs if side != "ours"]
    table = Table(
        "seconds per step",
        *runs,
        *(f"ours / {side}" for side in others),
        "share of our step",
        title=f"{parameters / 1e6:.1f}M parameters, {setting.prompts} prompts x {GROUP} answers of "
        f"{setting.tokens} tokens",
        caption=f"medians of {rounds} x {setting.steps} steps after {setting.warm_up}",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    ours_step = median("ours", "step")
    for part in (*PARTS, "step"):
        ours = median("ours", part)
        ratios = [
            f"{ours / theirs:.3f}" if part != "other" and (theirs := median(side, part)) else ""
            for side in others
        ]
        if part == "step":
            table.add_section()
        table.add_row(
            part,
            *(f"{median(side, part):.3f}" for side in runs),
            *ratios,
            f"{ours / ours_step:.0%}",
            style="bold" if part == "step" else None,
        )

    def row(name: str, value) -> None:
        table.add_row(name, *(value(side) for side in runs))

    def spread(side: str) -> str:
        steps = [step["step"] for run in runs[side] for step in run.steps]
        return f"{min(steps):.3f} - {max(steps):.3f}"

    row("step, fastest - slowest", spread)
    table.add_section()
    row("tokens per answer", lambda side: f"{median(side, 'length'):.1f}")
    row(
        "sampled tokens/s",
        lambda side: f"{setting.answers * median(side, 'length') / median(side, 'rollout'):,.0f}",
    )
    row(
        "once, seconds a run",
        lambda side: " ".join(f"{run.once_seconds:.0f}" for run in runs[side]),
    )
    row(
        "load average after each run",
        lambda side: " ".join(f"{run.load:.1f}" for run in runs[side]),
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", nargs="+", choices=SIZES, default=["tiny", "large"], help="(default: tiny large)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="how often each side runs: ours, TRL, TRL merged, ours, ... (default %(default)s)",
    )
    parser.add_argument(
        "--prompts", type=int, help=f"prompts a step, {GROUP} answers each (default: the size's)"
    )
    parser.add_argument(
        "--draws",
        action="store_true",
        help="ours with a draw of the noise for each step, for each group and for each answer",
    )
    arguments = parser.parse_args()
    settings = [SIZES[size] for size in arguments.size]
    if arguments.prompts:
        settings = [dataclasses.replace(each, prompts=arguments.prompts) for each in settings]

    os.environ["OMP_NUM_THREADS"] = str(CORES)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 110)
    for setting in settings:
        with tempfile.TemporaryDirectory(prefix="step_") as folder:
            work = Path(folder)
            parameters = make_model(work / "model", setting.shape)
            left_out = "TRL" if arguments.draws else "draws"
            runs = {side: [] for side in SIDES if not side.startswith(left_out)}
            if setting.shape != "smollm2":
                runs.pop("TRL, vLLM", None)
            for turn in range(arguments.rounds):
                for side in list(runs):
                    with console.status(f"{setting.shape}, round {turn + 1}: {side}"):
                        try:
                            runs[side].append(measure(side, setting, work / "model", work))
                        except RuntimeError as error:
                            if side == "ours":
                                raise
                            console.print(f"{side} is left out: {error}", markup=False)
                            del runs[side]
            report(setting, parameters, runs, console)


if __name__ == "__main__":
    main()
