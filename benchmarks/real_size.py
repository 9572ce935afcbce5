"""How near a rollout and an update at a real model's size come to what this machine's matrix
products reach alone.

    # SmolLM2-135M (make real-model), float32 and bfloat16, 10 minutes
    python benchmarks/real_size.py --threads 2
    python benchmarks/real_size.py --config grpo_steps_moe_cpu --answers 64
    # 10M parameters
    python tools/make_tiny_model.py --large --output models/large
    python benchmarks/real_size.py --config grpo_tiny_moe_cpu --model models/large --answers 64

Rollout: answers of exactly 24 tokens to prompts of 100, sampled by the local engine's vLLM, with
linear layers as it packs them (local/packing.py) and as torch multiplies ("torch's", before they
were packed); a round of each, in turn. Update: forward, backward and optimizer of one rank on
answers of 124 tokens. A clock around every matrix product says how long they take inside (experts'
fused kernel aside), and the same products are then made again, alone: the rate that is there to be
had. Seconds are medians of --rounds.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROMPT, ANSWER = 100, 24  # tokens
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Products:
    """Seconds in matrix products, and which: (rows, inner, columns, dtype) by how often."""

    def __init__(self):
        self.seconds, self.made = 0.0, Counter()

    def timed(self, product, a, b):
        """product(...), which multiplies a [..., m, k] and b [..., k, n]."""
        started = time.perf_counter()
        result = product()
        self.seconds += time.perf_counter() - started
        batch = a.shape[:-2].numel() if b.dim() > 2 else 1
        rows = a.shape[-2] if b.dim() > 2 else a.shape[:-1].numel()  # an expert may have no tokens
        self.made[rows, a.shape[-1], b.shape[-1], a.dtype] += batch
        return result

    def linear(self, call, x, weight, bias=None):
        """`call`, a linear layer, timed."""
        return self.timed(lambda: call(x, weight, bias), x, weight.t())

    @property
    def operations(self) -> float:
        return sum(2.0 * m * k * n * count for (m, k, n, _), count in self.made.items())

    def seconds_alone(self) -> float:
        """Of the same products, made one after the other with the operands of a layer that is used
        again.
        """
        seconds = 0.0
        for (m, k, n, dtype), count in self.made.items():
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
            times = []
            for _ in range(5):
                started = time.perf_counter()
                torch.nn.functional.linear(a, b)
                times.append(time.perf_counter() - started)
            seconds += statistics.median(times) * count
        return seconds


class Clock(TorchDispatchMode):
    """Inside `with` every product of matrices, backward passes included, is timed."""

    def __init__(self):
        super().__init__()
        self.products = Products()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator not in PRODUCTS:
            return operator(*args, **(kwargs or {}))
        a, b = args[-2:]
        return self.products.timed(lambda: operator(*args, **(kwargs or {})), a, b)


def rollout(recipe, dtype: str, answers: int, rounds: int):
    """Yields (what, seconds of each round, Products of the last)."""
    from mindspeed_qerl.local.packing import packed_linears
    from mindspeed_qerl.local.rollout import RolloutEngine, RolloutRequest

    engine = RolloutEngine(
        recipe.model.path, dtype, PROMPT + ANSWER, answers, recipe.local.kv_cache_gib
    )
    prompts = torch.randint(
        10, 60, (answers // 8, PROMPT), generator=torch.Generator().manual_seed(1)
    ).tolist()
    layers = packed_linears(engine.model)
    packed = [layer.cpu_linear for layer in layers]
    found = {"packed": [], "torch's": []}
    for _ in range(rounds + 1):
        for name, seconds in found.items():
            products = Products()
            for layer, of_layer in zip(layers, packed):
                call = of_layer if name == "packed" else torch.nn.functional.linear
                layer.cpu_linear = partial(products.linear, call)
            started = time.perf_counter()
            sampling = dict(temperature=1.0, max_tokens=ANSWER, ignore_eos=True)
            engine.generate(RolloutRequest(prompts, 8, 1, sampling))
            seconds.append((time.perf_counter() - started, products))
    for name, seconds in found.items():  # the first round packs, and warms up
        yield f"rollout, {name} linear layers", [one for one, _ in seconds[1:]], seconds[-1][1]


def update(recipe, dtype: str, answers: int, rounds: int):
    """The same of one rank's updates."""
    import dataclasses

    import numpy as np

    from mindspeed_qerl.families import read_shape
    from mindspeed_qerl.local.batch import Answer, build_batch
    from mindspeed_qerl.local.rank import TrainRank

    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype=dtype))
    rng = np.random.default_rng(1)
    tokens = [rng.integers(10, 60, PROMPT + ANSWER).tolist() for _ in range(answers)]
    batch = build_batch([Answer(row[:PROMPT], row[PROMPT:], [-4.0] * ANSWER) for row in tokens])
    batch.advantages[:] = rng.normal(size=answers)
    with tempfile.TemporaryDirectory() as folder:
        rank, seconds = (
            TrainRank(recipe, read_shape(recipe.model.path), 0, f"file://{folder}/rendezvous"),
            [],
        )
        for counted in range(rounds + 1):
            clock = Clock()
            with clock if counted == rounds else contextlib.nullcontext():
                started = time.perf_counter()
                rank.train([batch])
                seconds.append(time.perf_counter() - started)
        torch.distributed.destroy_process_group()
    yield "update", seconds[1:], clock.products


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from mindspeed_qerl.recipe.compose import compose
    from mindspeed_qerl.recipe.reader import read_recipe

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="grpo_smollm2_135m_gsm8k_cpu")
    parser.add_argument("--model", metavar="DIR", help="another than the config's")
    parser.add_argument(
        "--answers",
        type=int,
        nargs="+",
        default=[16, 64],
        help="of a rollout; an update has the first (default: 16 64)",
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1], help="a number of threads each (default: 1)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    overrides = ["rl_config.actor_resource.num_npus=1", "actor_config.expert_model_parallel_size=1"]
    if arguments.model:
        overrides.append(f"megatron_training.tokenizer_name_or_path={arguments.model}")
    recipe = read_recipe(compose(arguments.config, overrides))
    table = Table(
        "what",
        "dtype",
        "threads",
        "answers",
        "seconds",
        "tokens/s",
        "in products",
        "GFLOPS there",
        "alone",
        title=recipe.model.path,
        caption=f"load average {os.getloadavg()[0]:.1f}",
    )
    for dtype in arguments.dtypes:
        for threads in arguments.threads:
            for number, answers in enumerate(arguments.answers):
                for part in (rollout, update) if number == 0 else (rollout,):
                    # each in a process of its own
                    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
                        rows = pool.apply(
                            measured, (part, recipe, dtype, answers, arguments.rounds, threads)
                        )
                    for row in rows:
                        table.add_row(*row)
                        print("  ".join(row), flush=True)
    Console(width=160).print(table)


def measured(part, recipe, dtype: str, answers: int, rounds: int, threads: int) -> list[list[str]]:
    """Rows of the table."""
    os.environ.update(OMP_NUM_THREADS=str(threads), VLLM_LOGGING_LEVEL="ERROR")
    torch.set_num_threads(threads)
    rows = []
    for what, seconds, products in part(recipe, dtype, answers, rounds):
        torch.set_num_threads(threads)  # vLLM sets it, too
        median = statistics.median(seconds)
        tokens = answers * (ANSWER if part is rollout else ANSWER + PROMPT) / median
        rows.append(
            [
                what,
                dtype,
                str(threads),
                str(answers),
                f"{median:.2f}",
                f"{tokens:,.0f}",
                f"{products.seconds / seconds[-1]:.0%}",
                f"{products.operations / products.seconds / 1e9:.0f}",
                f"{products.operations / products.seconds_alone() / 1e9:.0f}",
            ]
        )
    return rows


if __name__ == "__main__":
    main()
