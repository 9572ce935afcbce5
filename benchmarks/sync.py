"""What one sync of merged weights into vLLM costs: seconds and memory beside a plain copy of the same bytes, in one run.

    python benchmarks/sync.py                       all sizes, draws docs/images/sync.png; about 10 minutes on 2 cores
    python benchmarks/sync.py --only parameters

The local engine with a Qwen3-MoE of random weights, LoRA on all four targets, float32: all its ranks merge, the rollout engine loads. The memory of a
rank is what it held at most during a sync beyond what it held before; a part of its merged weights (`local.sync_buffer_mib`, 64 MiB) should bound
it, whatever the model's size. The copy is one thread's, of as many bytes as the sync carries, from one array into another.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
BASE = {"hidden": 512, "experts": 16, "ranks": 1}
SERIES = {"parameters": [{"hidden": width} for width in (256, 512, 1024)],
          "experts": [{"experts": count} for count in (8, 16, 32)],
          "ranks": [{"ranks": count} for count in (1, 2, 4)]}
SYNCS, LAYERS = 5, 4


def make_model(directory: Path, hidden: int, experts: int) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=128, hidden_size=hidden, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4,
        head_dim=hidden // 8, moe_intermediate_size=hidden // 2, num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=512, dtype="float32")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def most_memory(pid: int) -> int:
    """Bytes that the process held at most since `forget`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def forget(pid: int) -> None:
    """Start `most_memory` anew (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(folder: Path, hidden: int, experts: int, ranks: int) -> dict[str, float]:
    from mindspeed_qerl.config import compose
    from mindspeed_qerl.gsm8k.word_problems import make_problems, write_problems
    from mindspeed_qerl.local import settings
    from mindspeed_qerl.local.engine import LocalEngine
    from mindspeed_qerl.runs.directory import RunDirectory
    from mindspeed_qerl.runs.progress import Progress

    model, data = folder / "model", folder / "data.jsonl"
    make_model(model, hidden, experts)
    write_problems(data, make_problems([(1, 2)], 8, 1))
    raw = compose("grpo_tiny_moe_cpu", [
        f"megatron_training.tokenizer_name_or_path={model}", f"gsm8k.train_file={data}", f"gsm8k.test_file={data}", "aqn=off",
        f"rl_config.actor_resource.num_npus={ranks}", f"actor_config.expert_model_parallel_size={ranks}"])
    config = settings.check(raw)
    run = RunDirectory.create(folder / "runs", "sync", config=raw, command=sys.argv, seed=1, data_files={})
    with Progress(1, "sync") as progress, LocalEngine(config, run, None, progress) as engine:
        engine.team.wait_until_ready()
        engine.report_targets()
        engine.proved = True  # the proof of what arrived is not part of a sync
        engine.sync()
        pids = engine.team.pids
        before = {name: most_memory(pid) for name, pid in pids.items() if not forget(pid)}
        seconds = []
        for _ in range(SYNCS):
            started = time.perf_counter()
            engine.sync()
            seconds.append(time.perf_counter() - started)
        grown = {name: most_memory(pid) - before[name] for name, pid in pids.items()}
    layer = 3 * hidden**2 + experts * 3 * hidden * (hidden // 2)  # q and o, k and v half as large; gate, up and down of each expert
    size = 4 * LAYERS * layer
    source, target, copies = np.ones(size, np.uint8), np.empty(size, np.uint8), []
    for _ in range(SYNCS):
        started = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - started)
    return {"mib": size / 2**20, "sync": statistics.median(seconds), "copy": statistics.median(copies),
            "rank": max(grown[f"rank {rank}"] for rank in range(ranks)) / 2**20, "rollout": grown["rollout engine"] / 2**20}


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axis, series in zip(figure.subplots(1, 3), SERIES):
        of = [row for row in rows if row["series"] == series]
        x = [row["mib"] if series == "parameters" else row[series] for row in of]
        axis.plot(x, [row["sync"] for row in of], "o-", label="sync, s")
        axis.plot(x, [row["copy"] for row in of], "s--", label="plain copy, s")
        axis.set(xlabel="MiB of merged weights" if series == "parameters" else series, ylim=(0, None), title=f"by {series}")
        memory = axis.twinx()
        memory.plot(x, [row["rank"] for row in of], "^:", color="tab:green", label="a rank's extra memory, MiB")
        memory.set_ylim(0, max(160, *(row["rank"] for row in of)) * 1.1)
        lines = [line for a in (axis, memory) for line in a.get_lines()]
        axis.legend(lines, [line.get_label() for line in lines], fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SERIES)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "sync.png")
    arguments = parser.parse_args()
    rows = []
    print("| by | hidden | experts | ranks | merged MiB | sync s | copy s | sync / copy | rank +MiB | rollout +MiB |", flush=True)
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for series in [arguments.only] if arguments.only else SERIES:
        for change in SERIES[series]:
            sizes = BASE | change
            with tempfile.TemporaryDirectory() as folder:
                row = sizes | {"series": series} | measure(Path(folder), **sizes)
            rows.append(row)
            print(f"| {series} | {row['hidden']} | {row['experts']} | {row['ranks']} | {row['mib']:.0f} | {row['sync']:.2f} | {row['copy']:.3f} | "
                  f"{row['sync'] / row['copy']:.1f} | {row['rank']:.0f} | {row['rollout']:.0f} |", flush=True)
    if not arguments.only:
        plot(rows, arguments.output)
        print(arguments.output)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
