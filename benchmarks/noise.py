"""What the noise does: to the weights, in bfloat16 and float32, and to the distance between the
policy that samples and the one that is trained.

    # about 6 minutes on 2 cores; draws docs/images/noise_{precision,kl,routing}.png
    python benchmarks/noise.py
    # seconds of a rollout by who has a draw of its own
    python benchmarks/noise.py --draws

First: the schedules qerl, strong and mild on norm weights of the quickstart's model and on weights
of 1, in both dtypes: measured standard deviation of (noisy - clean) over nominal. Second: two runs
of the quickstart, float32 and bfloat16, with a sigma that rises from stage to stage and a learning
rate that moves nothing; the KL between rollout and training policy (k3, nats per token), mean over
the draws of a stage, beside c sigma^2. Third: what keeps it from that law, the choice of experts:
the KL over the whole vocabulary by transformers, with two experts per token and with all of them,
where nothing is chosen.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np

from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, GREEN, RED, STYLE

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "tiny_qwen3_moe"
PRESETS = ("qerl", "strong", "mild")
STAGES, DRAWS = 13, 16
# bfloat16 swallows so much of smaller noise that a run stops itself
LEAST_SIGMA = {"float32": 0.001, "bfloat16": 0.01}
NAMES = ("aqn/measured_std", "mismatch/k3", "mismatch/effective_sample_size")


def norms(dtype, value: float | None):
    """RMSNorms with the weights of the model's norms before the experts, repeated to 65,536 of
    them, or with all weights `value`.
    """
    import torch

    from mindspeed_qerl.families.checkpoint import Checkpoint

    checkpoint = Checkpoint(MODEL)
    names = [name for name in checkpoint.files if name.endswith("post_attention_layernorm.weight")]
    weights = (
        torch.cat([checkpoint.read(name).float() for name in names])
        if value is None
        else torch.tensor([value])
    )
    weights = weights.repeat(-(-65536 // len(weights)))[:65536].to(dtype)
    model = torch.nn.Sequential(torch.nn.RMSNorm(len(weights), dtype=dtype))
    model[0].weight.data.copy_(weights)
    return model


def precision(image: Path) -> None:
    import logging

    import matplotlib as mpl
    import torch
    from matplotlib.figure import Figure

    from mindspeed_qerl.aqn.injector import NoiseInjector

    logging.disable()  # the warnings that say the same
    print("measured std / nominal, stage by stage")
    print(
        "| schedule | dtype | weights | "
        + " | ".join(f"stage {stage}" for stage in range(1, 10))
        + " |"
    )
    print("|---" * 12 + "|")
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.4), layout="constrained")
        for axis, preset in zip(figure.subplots(1, 3, sharey=True), PRESETS):
            recipe = read_recipe(compose("grpo_tiny_moe_cpu", [f"aqn={preset}"]))
            schedule = recipe.noise.noise_schedule(10)
            sigmas = schedule.sigmas()[1:]
            axis.loglog(sigmas, sigmas, color="black", linewidth=1, label="nominal")
            for dtype, value, color, marker in (
                ("float32", None, GREEN, "o"),
                ("bfloat16", None, BLUE, "s"),
                ("bfloat16", 1.0, RED, "^"),
            ):
                injector = NoiseInjector(norms(getattr(torch, dtype), value), "*", seed=0)
                levels = map(schedule.level, range(1, 10))
                measured = [injector.apply(level).measured_std for level in levels]
                injector.remove()
                weights = "1" if value else "the model's"
                axis.plot(
                    sigmas,
                    [found or np.nan for found in measured],
                    marker,
                    color=color,
                    label=f"{dtype}, weights {weights}",
                )
                print(
                    f"| {preset} | {dtype} | {weights} | "
                    + " | ".join(f"{found / sigma:.2f}" for found, sigma in zip(measured, sigmas))
                    + " |"
                )
            axis.set(title=f"aqn={preset}", xlabel="nominal sigma")
            axis.invert_xaxis()
        figure.axes[0].set_ylabel("measured std of (noisy - clean)")
        figure.axes[0].legend()
        figure.savefig(image, dpi=130)
    print(image, flush=True)


def rows_by_sigma(root: Path, dtype: str, *more: str) -> list[list[dict]]:
    """The metrics of each stage of a run whose sigma rises to 0.3 and that learns nothing; the
    first stage is without noise. `more` are overrides.
    """
    overrides = [
        "aqn=qerl",
        f"aqn.sigma_start={LEAST_SIGMA[dtype]}",
        "aqn.sigma_end=0.3",
        f"aqn.num_stages={STAGES}",
        f"megatron_training.train_iters={STAGES * DRAWS}",
        "megatron_training.save_interval=100000",
        "actor_config.lr=1e-12",
        f"generate_config.dtype={dtype}",
        "eval.n_problems=1",
        "eval.every=1000",
        f"run.root={root}",
        f"run.name={'-'.join([dtype, *more])}",
        "run.tensorboard=false",
        *more,
    ]
    subprocess.run(
        [sys.executable, "cli/train_grpo.py", "--config-name", "grpo_tiny_moe_cpu", *overrides],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (file,) = (root / "-".join([dtype, *more])).glob("*/metrics.jsonl")
    rows = read_jsonl(file)
    return [rows[start : start + DRAWS] for start in range(0, len(rows), DRAWS)]


def growth(image: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), tempfile.TemporaryDirectory() as root:
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        kl, size = figure.subplots(1, 2)
        for dtype, color, marker in (("float32", GREEN, "o"), ("bfloat16", BLUE, "s")):
            rows = [
                {name: np.mean([row[name] for row in stage]) for name in NAMES}
                for stage in rows_by_sigma(Path(root), dtype)
            ]
            floor, noisy = rows[0]["mismatch/k3"], rows[1:]
            sigma, k3 = (
                np.array([row[name] for row in noisy])
                for name in ("aqn/measured_std", "mismatch/k3")
            )
            large = (
                sigma > 0.02
            )  # below it a single token that goes to other experts outweighs all the rest
            slope = np.polyfit(np.log(sigma[large]), np.log(k3[large] - floor), 1)[0]
            factor = (k3[-1] - floor) / sigma[-1] ** 2
            print(
                f"{dtype}: k3 without noise {floor:.2g}; from sigma 0.02 to {sigma[-1]:.2g} it "
                f"grows like sigma^{slope:.2f}, to {k3[-1]:.2g}; that is {factor:.2g} sigma^2, "
                f"which at sigma {sigma[0]:.2g} would be {factor * sigma[0] ** 2:.2g}, and it is "
                f"{k3[0] - floor:.2g} above no noise; effective sample size at the end "
                f"{noisy[-1]['mismatch/effective_sample_size']:.3f}",
                flush=True,
            )
            kl.loglog(sigma, k3, marker, color=color, label=dtype)
            kl.loglog(
                sigma,
                factor * sigma**2 + floor,
                "-",
                color=color,
                linewidth=1,
                label=f"{floor:.1g} + {factor:.2g} sigma^2",
            )
            size.semilogx(
                sigma,
                [row["mismatch/effective_sample_size"] for row in noisy],
                marker,
                color=color,
                label=dtype,
            )
        kl.set(
            title="KL between rollout and training policy",
            xlabel="sigma, as measured",
            ylabel="k3, nats per token",
        )
        size.set(
            title="Effective sample size",
            xlabel="sigma, as measured",
            ylabel="share of the tokens",
            ylim=(None, 1.0005),
        )
        kl.legend()
        size.legend()
        figure.savefig(image, dpi=130)
    print(image)


def exact_kl(experts: int, sigmas: np.ndarray) -> np.ndarray:
    """KL(noisy || clean) over the vocabulary, nats per token of the right answers to 64 held-out
    problems, mean over `DRAWS`, for each of `sigmas`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mindspeed_qerl.aqn.injector import NoiseInjector
    from mindspeed_qerl.aqn.schedule import NoiseLevel

    model = AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, num_experts_per_tok=experts
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (MODEL / "data" / "raw" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:64]]
    batch = tokenizer(
        [f"{row['question']}\n{row['answer']}" for row in rows],
        padding=True,
        return_tensors="pt",
        return_token_type_ids=False,
    )
    asked = torch.zeros_like(batch.attention_mask, dtype=torch.bool)
    for i, row in enumerate(rows):
        # padded on the left; what predicts the answer's tokens
        asked[i, -len(tokenizer(row["answer"]).input_ids) - 1 : -1] = True

    def logprobs():
        with torch.no_grad():
            return model(**batch).logits[asked].double().log_softmax(-1)

    clean, kl = logprobs(), []
    for sigma in sigmas:
        injector = NoiseInjector(model, "auto", seed=0)
        kl.append(0.0)
        for draw in range(DRAWS):
            injector.apply(NoiseLevel(DRAWS + draw, 1, float(sigma)))
            noisy = logprobs()
            kl[-1] += (noisy.exp() * (noisy - clean)).sum(-1).mean().item() / DRAWS
        injector.remove()
    return np.array(kl)


def routing(image: Path) -> None:
    import logging

    import matplotlib as mpl
    from matplotlib.figure import Figure

    logging.disable()
    sigmas = np.geomspace(0.001, 0.3, 12)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        axis = figure.subplots()
        for experts, color, marker in ((2, RED, "o"), (8, BLUE, "s")):
            kl = exact_kl(experts, sigmas)
            slope = np.polyfit(np.log(sigmas[sigmas < 0.05]), np.log(kl[sigmas < 0.05]), 1)[0]
            print(
                f"{experts} of 8 experts: where sigma < 0.05 the KL grows like sigma^{slope:.2f}; "
                f"KL / sigma^2 is {kl[0] / sigmas[0] ** 2:.3g} at sigma {sigmas[0]:g} and "
                f"{kl[-1] / sigmas[-1] ** 2:.3g} at {sigmas[-1]:g}"
            )
            axis.loglog(
                sigmas, kl, marker, color=color, label=f"{experts} of 8 experts: sigma^{slope:.2f}"
            )
            axis.loglog(sigmas, kl[-1] * (sigmas / sigmas[-1]) ** 2, "-", color=color, linewidth=1)
        axis.set(
            title="KL(noisy || clean); lines: sigma^2", xlabel="sigma", ylabel="nats per token"
        )
        axis.legend()
        figure.savefig(image, dpi=130)
    print(image)


def draws(rounds: int = 3) -> None:
    """Seconds to sample a step of 10M parameters, 8 prompts x 8 answers of 256 tokens, in turn with
    one draw of the noise for the step, for each group, for each answer, and for each answer without
    reading the prefix cache; and each over the first of its round, as are its processor's seconds,
    which other programs change less.
    """
    os.environ.update(OMP_NUM_THREADS="2")
    import time

    import torch
    from step import SIZES, make_model  # beside this file

    from mindspeed_qerl.aqn.injector import NoiseInjector
    from mindspeed_qerl.aqn.schedule import NoiseLevel, draw_numbers
    from mindspeed_qerl.local.rollout import RolloutEngine, RolloutRequest
    from mindspeed_qerl.local.serving import model_runner

    setting = SIZES["large"]
    level = NoiseLevel(step=1, stage=1, sigma=0.05)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model, setting.shape)
        engine = RolloutEngine(str(model), "float32", 352, 256, 1, noise={"seed": 1})
        runner = model_runner(engine.llm)
        by_row = NoiseInjector(engine.model, seed=1, draws="answer", runner=runner)
        injectors = {"step": engine.injector}
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(3, 90, (setting.prompts, 40), generator=generator).tolist()
        sampling = {"max_tokens": setting.tokens, "ignore_eos": True}
        seconds: dict[str, list[np.ndarray]] = {}
        for round in range(rounds + 1):  # the first is not counted
            for name in ("step", "group", "answer", "answer, unread"):
                kind = name.partition(",")[0]
                engine.injector = injectors.get(kind, by_row)
                numbers = [] if kind == "step" else draw_numbers(kind, setting.prompts, 8)
                more = {"skip_reading_prefix_cache": True} if name != kind else {}
                request = RolloutRequest(prompts, 8, round, sampling | more, level, numbers)
                started = np.array([time.perf_counter(), time.process_time()])
                engine.generate(request)
                spent = np.array([time.perf_counter(), time.process_time()]) - started
                if round:
                    seconds.setdefault(name, []).append(spent)
    print("| one draw for each | seconds, median | over step's, median | of the processor |")
    print("|---|---|---|---|")
    for name, found in seconds.items():
        wall, processor = np.median(np.divide(found, seconds["step"]), axis=0)
        print(f"| {name} | {np.median(found, axis=0)[0]:.2f} | {wall:.3f} | {processor:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--draws", action="store_true")
    arguments = parser.parse_args()
    if arguments.draws:
        draws()
        return
    images = arguments.images
    precision(images / "noise_precision.png")
    growth(images / "noise_kl.png")
    routing(images / "noise_routing.png")


if __name__ == "__main__":
    main()
