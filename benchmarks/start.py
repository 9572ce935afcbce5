"""Seconds from a command to the first sampled answer, ours beside TRL's, and of commands that train
nothing.

    python benchmarks/start.py                   # 3 rounds, 4 minutes on 2 cores
    python benchmarks/start.py --before OTHER    # takes turns with OTHER, another checkout

The quickstart's model with random weights. Ours is `cli/train_grpo.py` until it says how accurate
one answer was before the first step: Ray, two Megatron ranks, vLLM, the first sync and its proof
are done then. TRL is the script of step.py without its one step: imports, model, trainer and
shutdown. They take turns in fresh processes.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

from step import REPO, SIZES, make_model, measure, our_overrides

from mindspeed_qerl.common.markdown import markdown_table

SETTING = replace(SIZES["tiny"], warm_up=0, steps=1)
COMMANDS = {  # what trains nothing
    "--help": ["cli/train_grpo.py", "--help"],
    "a key that does not exist": [
        "cli/train_grpo.py",
        "--config-name",
        "grpo_tiny_moe_cpu",
        "aqn.sigma=1",
    ],
    "a layout that cannot exist": [
        "cli/train_grpo.py",
        "--config-name",
        "grpo_qwen3_30b_a3b_gsm8k_16npu",
        "megatron_training.tensor_model_parallel_size=3",
    ],
    "tools/plan_layout.py": ["tools/plan_layout.py", "--model", "qwen3_30b_a3b", "--npus", "12"],
    "tools/compare_runs.py --help": ["tools/compare_runs.py", "--help"],
    "tools/evaluate.py --help": ["tools/evaluate.py", "--help"],
    "tools/export_adapter.py --help": ["tools/export_adapter.py", "--help"],
    "tools/make_real_model.py --help": ["tools/make_real_model.py", "--help"],
}


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def until_answered(checkout: Path, model: Path, work: Path) -> float:
    """Seconds until a run of `checkout` has sampled; it is interrupted then."""
    command = [
        sys.executable,
        "cli/train_grpo.py",
        "--config-name",
        "grpo_tiny_moe_cpu",
        *our_overrides(SETTING, model),
        "eval.n_problems=1",
        "eval.samples_per_problem=1",
        f"run.root={tempfile.mkdtemp(dir=work)}",
    ]
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=environment(checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as run:
        for line in run.stdout:
            if "held-out accuracy" in line:
                seconds = time.perf_counter() - started
                run.send_signal(signal.SIGINT)
                run.stdout.read()
                return seconds
    raise RuntimeError(f"the run of {checkout} ended with {run.returncode} before it had sampled")


def seconds_of(checkout: Path, words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env=environment(checkout),
        check=False,
        capture_output=True,
    )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, metavar="DIR", help="another checkout of this project"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    checkouts = {
        "ours": REPO,
        **({"before": arguments.before.resolve()} if arguments.before else {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model, SETTING.shape)
        sides: dict[str, Callable[[], float]] = {
            name: lambda checkout=checkout: until_answered(checkout, model, work)
            for name, checkout in checkouts.items()
        }
        sides["TRL"] = lambda: measure("TRL", SETTING, model, work).once_seconds
        found = {name: [] for name in sides}
        for number in range(arguments.rounds):
            for name, side in sides.items():
                found[name].append(side())
                print(f"round {number + 1}, {name}: {found[name][-1]:.1f} s", flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(
        "\n".join(
            markdown_table(
                ["command to first answer", "seconds, each round", "median", "of TRL's"],
                [
                    [
                        name,
                        ", ".join(f"{each:.1f}" for each in seconds),
                        f"{medians[name]:.1f}",
                        f"{medians[name] / medians['TRL']:.2f}",
                    ]
                    for name, seconds in found.items()
                ],
            )
        ),
        end="\n\n",
    )
    print(
        "\n".join(
            markdown_table(
                ["seconds, the fastest of five", *checkouts],
                [
                    [
                        label,
                        *(
                            f"{min(seconds_of(checkout, words) for _ in range(5)):.2f}"
                            for checkout in checkouts.values()
                        ),
                    ]
                    for label, words in COMMANDS.items()
                ],
            )
        )
    )


if __name__ == "__main__":
    main()
