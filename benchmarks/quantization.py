"""Quantized rollouts: how far each format takes the policy that samples from the one that is
trained, beside noise.

    python benchmarks/quantization.py kl          # 15 minutes on 2 cores
    python benchmarks/quantization.py training    # half an hour

They draw docs/images/quantization_{kl,training}.png.

kl: runs of the quickstart in each format with a learning rate that moves nothing, without noise,
with and without routing replay: KL between rollout and training policy (k3) and effective sample
size; and the sigma of AQN that alone has that k3, read off a run whose sigma rises
(benchmarks/noise.py). training: runs that learn, in each format, with token_tis and routing replay
on and off: k3 of the last steps beside that of the first ones. One seed each: they say what happens
to the KL, not which one learns more (study.py).
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
from noise import rows_by_sigma

from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.compare.run import find_runs, read_run
from mindspeed_qerl.recipe.features import ROLLOUT_FORMATS
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, GREEN, RED, STYLE

ROOT = Path(__file__).resolve().parents[1]
DRAWS = 16  # steps of a run that learns nothing, 256 answers each
ENDS = 8  # first and last steps of a run that learns
COLORS = dict(zip(ROLLOUT_FORMATS, ("black", GREEN, BLUE, "#7f7f7f", RED, "#9467bd"), strict=True))


def rows_of(root: Path, *overrides: str) -> list[dict]:
    """The metrics of a run of the quickstart, made unless it is there."""
    name = "-".join(overrides).replace("/", "_")
    subprocess.run(
        [
            sys.executable,
            "cli/train_grpo.py",
            "--multirun",
            "--config-name",
            "grpo_tiny_moe_cpu",
            f"run.root={root}",
            f"run.name={name}",
            "run.tensorboard=false",
            "megatron_training.save_interval=100000",
            "eval.n_problems=1",
            "eval.every=1000",
            *overrides,
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    print(name, flush=True)
    (run,) = [run for path in find_runs([root / name]) if not (run := read_run(path)).faults]
    return read_jsonl(run.path / "metrics.jsonl")


def mean(rows: list[dict], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def equivalent_sigma(k3: float, sigmas: np.ndarray, k3s: np.ndarray) -> float:
    """Where the curve of noise has `k3`: between two points by a power law, beyond the ends by
    sigma^2.

    >>> round(equivalent_sigma(4e-6, np.array([0.01, 0.03]), np.array([1e-6, 9e-6])), 4)
    0.02
    """
    for place, end in ((k3 < k3s[0], 0), (k3 > k3s[-1], -1)):
        if place:
            return sigmas[end] * (k3 / k3s[end]) ** 0.5
    return float(np.exp(np.interp(np.log(k3), np.log(np.maximum.accumulate(k3s)), np.log(sigmas))))


def kl(root: Path, image: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = {
        (name, replay): rows_of(
            root,
            "aqn=off",
            "actor_config.lr=1e-12",
            f"megatron_training.train_iters={DRAWS}",
            f"rollout_quantization={name}",
            f"algorithm.routing_replay={replay}",
        )
        for name in ROLLOUT_FORMATS
        for replay in ("none", "rollout")
    }
    with tempfile.TemporaryDirectory() as folder:
        stages = rows_by_sigma(Path(folder), "float32", "algorithm.routing_replay=rollout")[1:]
    sigmas, k3s = (
        np.array([mean(stage, name) for stage in stages])
        for name in ("aqn/measured_std", "mismatch/k3")
    )
    rows = []
    for name in ROLLOUT_FORMATS:
        plain, replayed = found[name, "none"], found[name, "rollout"]
        error = f"{mean(plain, 'quantization/weight_error'):.2%}" if name != "none" else ""
        sigma = equivalent_sigma(mean(replayed, "mismatch/k3"), sigmas, k3s)
        rows.append(
            [
                name,
                error,
                f"{mean(plain, 'mismatch/k3'):.2e}",
                f"{mean(replayed, 'mismatch/k3'):.2e}",
                f"{mean(replayed, 'routing/flipped'):.2%}",
                f"{mean(plain, 'mismatch/effective_sample_size'):.4f}",
                f"{mean(plain, 'mismatch/effective_sample_size_of_answers'):.3f}",
                f"{sigma:.2g}" if name != "none" else "",
            ]
        )
    print(
        "\n".join(
            markdown_table(
                [
                    "format",
                    "error of the weights",
                    "k3",
                    "k3, routes replayed",
                    "other routes",
                    "effective sample size, tokens",
                    "answers",
                    "sigma of the same k3",
                ],
                rows,
            )
        )
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axis = figure.subplots()
        axis.loglog(sigmas, k3s, "o-", color="black", label="AQN alone")
        for name in ROLLOUT_FORMATS[1:]:
            k3 = mean(found[name, "rollout"], "mismatch/k3")
            axis.axhline(k3, color=COLORS[name], linewidth=1.5, label=name)
            axis.plot(equivalent_sigma(k3, sigmas, k3s), k3, "s", color=COLORS[name])
        axis.set(
            title="What a format does to the policy, and the noise that does as much (routes "
            "replayed)",
            xlabel="sigma of AQN, as measured",
            ylabel="k3, nats per token",
        )
        axis.legend()
        figure.savefig(image, dpi=130)
    print(image)


def training(root: Path, image: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    cells = [
        (correction, replay)
        for correction in ("none", "token_tis")
        for replay in ("none", "rollout")
    ]
    found = {
        (name, *cell): rows_of(
            root,
            "aqn=off",
            f"rollout_quantization={name}",
            f"rollout_correction={cell[0]}",
            f"algorithm.routing_replay={cell[1]}",
        )
        for name in ROLLOUT_FORMATS
        for cell in cells
    }
    rows = [
        [
            *key,
            *(f"{mean(part, 'mismatch/k3'):.2e}" for part in (of[:ENDS], of[-ENDS:])),
            f"{mean(of[-ENDS:], 'reward/mean'):.3f}",
        ]
        for key, of in found.items()
    ]
    print(
        "\n".join(
            markdown_table(
                [
                    "format",
                    "correction",
                    "routing_replay",
                    f"k3, first {ENDS} steps",
                    f"last {ENDS}",
                    "reward, last steps",
                ],
                rows,
            )
        )
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout="constrained")
        for axis, cell in zip(figure.subplots(1, len(cells), sharey=True), cells):
            for name in ROLLOUT_FORMATS[1:]:
                k3 = [row["mismatch/k3"] for row in found[(name, *cell)]]
                axis.semilogy(range(1, len(k3) + 1), k3, color=COLORS[name], label=name)
            axis.set_title(
                f"{'no correction' if cell[0] == 'none' else cell[0]}, "
                f"{'replayed' if cell[1] == 'rollout' else 'own'} routes",
                fontsize=10,
            )
            axis.set_xlabel("training step")
        figure.axes[0].set_ylabel("k3, nats per token")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("kl", "training"))
    parser.add_argument(
        "--root", type=Path, default=ROOT / "runs" / "quantization", help="where the runs are kept"
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    part = {"kl": kl, "training": training}[arguments.part]
    part(arguments.root, arguments.images / f"quantization_{arguments.part}.png")


if __name__ == "__main__":
    main()
