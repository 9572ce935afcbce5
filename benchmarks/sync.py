"""What one sync of merged weights into vLLM costs: seconds and memory beside a plain copy of the
same bytes, in one run.

    # all sizes, draws docs/images/sync.png; about 10 minutes on 2 cores
    python benchmarks/sync.py
    python benchmarks/sync.py --only parameters

The local engine with a Qwen3-MoE of random weights, LoRA on all four targets, float32: all its
ranks merge, the rollout engine loads. The memory of a process is what it held at most during a sync
beyond what it held before (its own pages, looked at every 2 ms); the merged weights of two layers
should bound it, whatever the model's size. The copy is one thread's, of as many bytes as the sync
carries, from one array into another.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Self

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BASE = {"hidden": 512, "experts": 16, "ranks": 1}
SERIES = {
    "parameters": [{"hidden": width} for width in (256, 512, 1024)],
    "experts": [{"experts": count} for count in (8, 16, 32)],
    "ranks": [{"ranks": count} for count in (1, 2, 4)],
}
SYNCS, LAYERS = 5, 4


def make_model(directory: Path, hidden: int, experts: int) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=128,
        hidden_size=hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        moe_intermediate_size=hidden // 2,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


class Watch:
    """Inside `with`: how many bytes of their own the processes held at most, beyond what they held
    at first.
    """

    def __init__(self, pids: dict[str, int]):
        self.files = {name: Path(f"/proc/{pid}/status") for name, pid in pids.items()}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self.before = {name: self._held(name) for name in self.files}
        self.most = dict(self.before)
        self.thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.stop.set()
        self.thread.join()

    def grown(self, name: str) -> float:
        """MiB."""
        return (self.most[name] - self.before[name]) / 2**20

    def _held(self, name: str) -> int:
        lines = self.files[name].read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])

    def _look(self) -> None:
        while not self.stop.wait(0.002):
            for name in self.files:
                self.most[name] = max(self.most[name], self._held(name))


def measure(folder: Path, hidden: int, experts: int, ranks: int) -> dict[str, float]:
    from mindspeed_qerl.demo.tiny_model import build_tokenizer
    from mindspeed_qerl.local.engine import Data
    from mindspeed_qerl.local.loop import LocalEngine
    from mindspeed_qerl.local.processes import launch
    from mindspeed_qerl.recipe.compose import compose
    from mindspeed_qerl.recipe.reader import read_recipe
    from mindspeed_qerl.runs.directory import RunDirectory
    from mindspeed_qerl.runs.observer import RunObserver
    from mindspeed_qerl.runs.progress import Progress
    from mindspeed_qerl.tasks.prompts import Prompts

    model, data = folder / "model", folder / "data.jsonl"
    make_model(model, hidden, experts)
    data.write_text('{"prompt": "How many?", "answer": "1"}\n' * 8)
    raw = compose(
        "grpo_tiny_moe_cpu",
        [
            f"megatron_training.tokenizer_name_or_path={model}",
            f"task.train_file={data}",
            f"task.test_file={data}",
            "aqn=off",
            f"rl_config.actor_resource.num_npus={ranks}",
            f"actor_config.expert_model_parallel_size={ranks}",
        ],
    )
    recipe = read_recipe(raw)
    tokenizer = build_tokenizer()
    prompts = Prompts(str(data), tokenizer, "plain", recipe.sampling.max_prompt_length)
    run = RunDirectory.create(
        folder / "runs", "sync", config=raw, command=sys.argv, seed=1, data_files={}
    )
    with Progress(1, "sync") as progress, launch(recipe, run) as processes:
        observer = RunObserver(recipe, run, None, progress)
        engine = LocalEngine(recipe, observer, processes, Data(tokenizer, prompts, prompts, set()))
        processes.wait_until_ready()
        seconds = []
        with Watch(processes.pids) as watch:
            for _ in range(
                1 + SYNCS
            ):  # the first one makes what the others use again; its time does not count
                started = time.perf_counter()
                engine.sync()
                seconds.append(time.perf_counter() - started)
    # q and o, k and v half as large; gate, up and down of each expert
    layer = 3 * hidden**2 + experts * 3 * hidden * (hidden // 2)
    size = 4 * LAYERS * layer
    source, target, copies = np.ones(size, np.uint8), np.empty(size, np.uint8), []
    for _ in range(SYNCS):
        started = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - started)
    return {
        "mib": size / 2**20,
        "sync": statistics.median(seconds[1:]),
        "copy": statistics.median(copies),
        "rank": max(watch.grown(f"rank {rank}") for rank in range(ranks)),
        "rollout": watch.grown("rollout engine"),
    }


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from mindspeed_qerl.runs.plots import BLUE, GREEN, ORANGE, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        for axis, series in zip(figure.subplots(1, 3), SERIES):
            of = [row for row in rows if row["series"] == series]
            x = [row["mib"] if series == "parameters" else row[series] for row in of]
            axis.plot(x, [row["sync"] for row in of], "o-", color=BLUE, label="sync, seconds")
            axis.plot(
                x,
                [row["copy"] for row in of],
                "s--",
                color=ORANGE,
                label="plain copy of the same bytes, seconds",
            )
            axis.set(
                xlabel="MiB of merged weights" if series == "parameters" else series,
                ylabel="seconds",
                ylim=(0, None),
            )
            memory = axis.twinx()
            memory.plot(
                x,
                [row["rank"] for row in of],
                "^:",
                color=GREEN,
                label="memory a rank takes for it, MiB",
            )
            memory.set(ylim=(0, max(160, *(row["rank"] for row in of)) * 1.1), ylabel="MiB")
            memory.grid(visible=False)
        lines = [
            line
            for a in (axis, memory)
            for line in a.get_lines()
            if not line.get_label().startswith("_")
        ]
        figure.legend(
            lines, [line.get_label() for line in lines], loc="outside lower center", ncols=3
        )
        figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SERIES)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "sync.png")
    arguments = parser.parse_args()
    rows = []
    print(
        "| by | hidden | experts | ranks | merged MiB | sync s | copy s | sync / copy | rank "
        "+MiB | rollout +MiB |",
        flush=True,
    )
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for series in [arguments.only] if arguments.only else SERIES:
        for change in SERIES[series]:
            sizes = BASE | change
            with tempfile.TemporaryDirectory() as folder:
                row = sizes | {"series": series} | measure(Path(folder), **sizes)
            rows.append(row)
            print(
                f"| {series} | {row['hidden']} | {row['experts']} | {row['ranks']} | "
                f"{row['mib']:.0f} | {row['sync']:.2f} | {row['copy']:.3f} | "
                f"{row['sync'] / row['copy']:.1f} | {row['rank']:.0f} | {row['rollout']:.0f} |",
                flush=True,
            )
    if not arguments.only:
        plot(rows, arguments.output)
        print(arguments.output)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
