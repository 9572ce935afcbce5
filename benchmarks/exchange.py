"""An all-to-all of experts' tokens among more ranks than cores: gloo beside the exchange through shared memory, in one run.

    python benchmarks/exchange.py --ranks 4 8 16

Each rank sends 47 rows of 64 float32 to each, as a rehearsal of Qwen3-30B-A3B does in every layer (93 tokens to 8 of 128 experts).
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROWS, WIDTH, ROUNDS = 47, 64, 5


def seconds(call: Callable[[], None], repeat: int = 100) -> float:
    """Per call, the fastest of some rounds."""
    call()
    taken = []
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(repeat):
            call()
        taken.append((time.perf_counter() - started) / repeat)
    return min(taken)


def measure(rank: int, ranks: int, rendezvous: str) -> None:
    from mindspeed_qerl.local import exchange

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    sent, splits, group = torch.randn(ranks * ROWS, WIDTH), [ROWS] * ranks, dist.group.WORLD
    ours, gloos = torch.empty_like(sent), torch.empty_like(sent)
    gloo_all_to_all = dist.all_to_all_single
    of_gloo = seconds(lambda: gloo_all_to_all(gloos, sent, splits, splits, group))
    of_ours = seconds(lambda: exchange.all_to_all_single(ours, sent, splits, splits, group))
    assert torch.equal(ours, gloos)
    if rank == 0:
        print(f"{ranks:5}  {1e3 * of_gloo:8.2f} ms  {1e3 * of_ours:8.2f} ms  {of_ours / of_gloo:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    print("ranks         gloo  shared memory   ratio")
    for ranks in parser.parse_args().ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (ranks, str(Path(folder) / "rendezvous")), nprocs=ranks)


if __name__ == "__main__":
    main()
