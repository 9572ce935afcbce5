"""Routing replay beside the noise: what noise does to the choice of experts, what replay does about
it, what it costs, and whether a policy learns more with it.

    python benchmarks/routing.py sigma       # 15 minutes on 2 cores
    python benchmarks/routing.py cost        # two minutes
    python benchmarks/routing.py learning    # an hour; killed, it resumes

They draw docs/images/routing_{sigma,layers,learning}.png.

sigma: runs of the quickstart with a sigma that rises from stage to stage and a learning rate that
moves nothing (benchmarks/noise.py), with and without replay, in float32 and bfloat16: share of
routes that the clean trainer would have chosen otherwise, by layer; KL between rollout and training
policy (k3) and effective sample size, beside sigma^2, the law of a model without experts. cost: two
runs at a time, with and without replay, on as many cores each; medians of the same steps. learning:
AQN x replay x token_tis on the quickstart, several seeds; accuracy after training, compared with
tools/compare_runs.py's statistics. Without noise, in float32, no route differs and replay changes
no bit (tests/local/test_run.py), so that there is no cell for it.
"""

import argparse
import os
import statistics
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
from mindspeed_qerl.compare.comparison import SIGNIFICANCE, compare
from mindspeed_qerl.compare.page import interval
from mindspeed_qerl.compare.run import find_runs, read_run
from mindspeed_qerl.compare.statistics import estimate
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.runs.plots import BLUE, GREEN, RED, STYLE

ROOT = Path(__file__).resolve().parents[1]
MODES = {"none": (RED, "o"), "rollout": (BLUE, "^")}
COST_STEPS = 30
# (aqn, routing_replay, rollout_correction) of the runs that learn
CELLS = [
    ("off", "none", "none"),
    ("qerl", "none", "none"),
    ("qerl", "rollout", "none"),
    ("qerl", "none", "token_tis"),
    ("qerl", "rollout", "token_tis"),
    ("strong", "none", "none"),
    ("strong", "rollout", "none"),
]
PAIRS = [(0, 1), (0, 2), (1, 2), (3, 4), (5, 6)]  # of cells that are compared


def stage_means(stages: list[list[dict]], name: str) -> np.ndarray:
    return np.array([np.mean([row[name] for row in stage]) for stage in stages])


def by_sigma(images: Path, modes: list[str], dtypes: list[str]) -> None:
    """Tables and pictures of `sigma`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), tempfile.TemporaryDirectory() as folder:
        figure, flips = (Figure(figsize=(10, 3.6), layout="constrained") for _ in range(2))
        layers_of = {}
        for axis, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes):
            rows = []
            for mode in modes:
                color, marker = MODES[mode]
                stages = rows_by_sigma(Path(folder), dtype, f"algorithm.routing_replay={mode}")
                sigma, k3 = (
                    stage_means(stages, "aqn/measured_std"),
                    stage_means(stages, "mismatch/k3"),
                )
                size = stage_means(stages, "mismatch/effective_sample_size")
                worst = [
                    max(row["mismatch/max_abs_prob_diff"] for row in stage) for stage in stages
                ]
                flipped = (
                    stage_means(stages, "routing/flipped")
                    if mode != "none"
                    else np.full(len(sigma), np.nan)
                )
                small = (sigma > 0) & (sigma < 0.05)
                above = np.maximum(k3[small] - k3[0], 1e-30)
                slope = np.polyfit(np.log(sigma[small]), np.log(above), 1)[0]
                print(
                    f"{dtype}, {mode}: below sigma 0.05 k3 grows like sigma^{slope:.2f}", flush=True
                )
                rows += [
                    [
                        mode,
                        f"{s:.2g}",
                        "" if np.isnan(f) else f"{f:.3%}",
                        f"{k:.2g}",
                        f"{e:.4f}",
                        f"{w:.2g}",
                    ]
                    for s, f, k, e, w in zip(sigma, flipped, k3, size, worst)
                ]
                axis.loglog(
                    sigma[1:], k3[1:], marker, color=color, label=f"{mode}: sigma^{slope:.2f}"
                )
                if mode == "rollout":
                    axis.loglog(
                        sigma[1:],
                        k3[-1] * (sigma[1:] / sigma[-1]) ** 2,
                        "-",
                        color="black",
                        linewidth=1,
                        label="sigma^2",
                    )
                    layers = sorted(
                        name for name in stages[0][0] if name.startswith("routing/flipped/layer_")
                    )
                    layers_of[dtype] = sigma, {name: stage_means(stages, name) for name in layers}
            axis.set(
                title=f"KL between rollout and training policy, {dtype}",
                xlabel="sigma, as measured",
                ylabel="k3, nats per token",
            )
            axis.legend()
            print(
                "\n".join(
                    markdown_table(
                        [
                            "routing_replay",
                            "sigma",
                            "other routes",
                            "k3",
                            "effective sample size",
                            "worst probability",
                        ],
                        rows,
                    )
                ),
                end="\n\n",
                flush=True,
            )
        for axis, (dtype, (sigma, layers)) in zip(
            flips.subplots(1, len(dtypes), squeeze=False)[0], layers_of.items()
        ):
            for (name, shares), color in zip(layers.items(), (BLUE, RED, GREEN)):
                axis.loglog(
                    sigma[1:],
                    shares[1:],
                    "o-",
                    color=color,
                    label=f"layer {name.rpartition('_')[2]}",
                )
            axis.set(
                title=f"Other routes than the trainer's own, {dtype}",
                xlabel="sigma, as measured",
                ylabel="share of choices",
            )
            axis.legend()
        for name, picture in (("sigma", figure), ("layers", flips)):
            picture.savefig(images / f"routing_{name}.png", dpi=130)
            print(images / f"routing_{name}.png")


def cost() -> None:
    """Medians of the parts of a step with replay over those without, from runs side by side."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            mode: subprocess.Popen(
                [
                    sys.executable,
                    "cli/train_grpo.py",
                    "--config-name",
                    "grpo_tiny_moe_cpu",
                    "aqn=off",
                    f"megatron_training.train_iters={COST_STEPS}",
                    "eval.n_problems=1",
                    "eval.every=1000",
                    f"algorithm.routing_replay={mode}",
                    f"run.root={folder}",
                    f"run.name={mode}",
                    "run.tensorboard=false",
                ],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for mode in ("none", "rollout")
        }
        for mode, run in runs.items():
            if run.wait():
                raise SystemExit(f"the run with routing_replay={mode} failed")
        rows = {
            mode: read_jsonl(next((Path(folder) / mode).glob("*/metrics.jsonl")))[3:]
            for mode in runs
        }
    for part in ("rollout", "reward", "update", "step"):
        median = {
            mode: statistics.median(row[f"time/{part}"] for row in of) for mode, of in rows.items()
        }
        print(
            f"{part}: {median['none']:.3f} s without, {median['rollout']:.3f} s with replay, ratio "
            f"{median['rollout'] / median['none']:.3f}"
        )


def learning(root: Path, image: Path, seeds: list[int], more: list[str]) -> None:
    """Table, verdicts and picture of `learning`."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    seeds_text = ",".join(map(str, seeds))
    for aqn, replay, correction in CELLS:
        subprocess.run(
            [
                sys.executable,
                "cli/train_grpo.py",
                "--multirun",
                "--config-name",
                "grpo_tiny_moe_cpu",
                f"aqn={aqn}",
                f"algorithm.routing_replay={replay}",
                f"rollout_correction={correction}",
                f"seed={seeds_text}",
                f"run.root={root}",
                f"run.name={aqn}-{replay}-{correction}",
                *more,
            ],
            cwd=ROOT,
            check=True,
        )
    runs = {
        cell: [
            run for path in find_runs([root / "-".join(cell)]) if not (run := read_run(path)).faults
        ]
        for cell in CELLS
    }
    accuracy = {
        cell: estimate(np.array([list(run.scores[max(run.scores)].values()) for run in of]))
        for cell, of in runs.items()
    }
    print(
        "\n".join(
            markdown_table(
                ["AQN", "routing_replay", "correction", "held-out accuracy"],
                [[*cell, interval(accuracy[cell])] for cell in CELLS],
            )
        ),
        end="\n\n",
    )
    rows, limit = [], SIGNIFICANCE / len(PAIRS)  # Bonferroni
    for first, second in PAIRS:
        (verdict,) = compare([*runs[CELLS[first]], *runs[CELLS[second]]]).verdicts
        found = verdict.difference
        word = verdict.word if found.p < limit else "not distinguishable"
        rows.append(
            [
                ", ".join(CELLS[second]),
                ", ".join(CELLS[first]),
                interval(found, "+"),
                f"{found.p:.2g}",
                word,
            ]
        )
    print(
        "\n".join(markdown_table(["of", "against", "difference", "p", "verdict"], rows)), end="\n\n"
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axis = figure.subplots()
        for cell, color, line in zip(
            CELLS, ("black", RED, BLUE, RED, BLUE, RED, BLUE), ("-", "-", "-", "--", "--", ":", ":")
        ):
            curves = [
                [np.mean(list(run.scores[step].values())) for step in sorted(run.scores)]
                for run in runs[cell]
            ]
            axis.plot(
                sorted(runs[cell][0].scores),
                np.mean(curves, axis=0),
                line,
                color=color,
                label=", ".join(cell),
            )
        axis.set(
            title=f"Held-out accuracy, mean of {len(seeds)} seeds (AQN, routing_replay, "
            "correction)",
            xlabel="training step",
            ylabel="accuracy",
        )
        axis.legend(fontsize=8)
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("sigma", "cost", "learning"))
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="of sigma; default: all"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of learning; default: 1 to 5"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT / "runs" / "routing", help="where its runs are kept"
    )
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    arguments, more = parser.parse_known_args()
    if arguments.part == "sigma":
        by_sigma(arguments.images, arguments.modes, arguments.dtypes)
    elif arguments.part == "cost":
        cost()
    else:
        learning(arguments.root, arguments.images / "routing_learning.png", arguments.seeds, more)


if __name__ == "__main__":
    main()
