"""Asks how coarse the grid of merged weights may be for LoRA to learn: a study that needs no large
model.

    python benchmarks/rounding_study.py --seeds 1 2 3 4 5 6   # runs what is missing, a minute each
    python benchmarks/rounding_study.py                       # tables and picture alone

What bfloat16 does to updates at lr 5e-6, a format with few bits of mantissa does to the larger ones
of the quickstart. Its recipe (grpo_tiny_moe_cpu, noise off) is run in float32, in one process, by
transformers' model; all linear weights lie on the coarsest format's grid, and so on every other's:
all runs begin with the same model. Ratio: root mean square of the update over the mean spacing,
after the last step. A run in float32 reached 7.75 spacings of 7 bits, hence BITS: 3.9, 1, 0.24 and
0.12.

    float32    the sampler gets the exact sum W + (alpha / r) B A
    nearest    rounded to nearest; the trainer computes W x + (alpha / r) B A x
    unbiased   rounded by the random bits of lora/rounding.py; the trainer computes with that, too

After the last step the held-out questions are answered by the sampler's weights and by the exact
sum. The rule, stated before the runs: of an arm's accuracy less float32's, paired by seed, the 95 %
interval (Student's) is below 0: "less"; within 5 points of 0: "as much"; else "undecided".
docs/studies/rounding.json keeps each run.
"""

import argparse
import json
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
import torch
from arrival import Adapted, Policy  # beside this file

from mindspeed_qerl.algorithm.advantages import group_advantages
from mindspeed_qerl.algorithm.losses import LossInputs, denominator, loss
from mindspeed_qerl.common.files import write_whole
from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.compare.page import interval
from mindspeed_qerl.compare.statistics import LEAST_SEEDS, Estimate, estimate
from mindspeed_qerl.local.batch import Answer, PromptOrder, build_batch
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.plots import BLUE, RED, STYLE
from mindspeed_qerl.tasks.prompts import load_tokenizer, plain_ids
from mindspeed_qerl.tasks.rewards import score
from mindspeed_qerl.tasks.rows import Row, read_rows

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "studies" / "rounding.json"
BITS = (6, 4, 2, 1)  # of mantissa: bfloat16 has 7, E4M3 3, E5M2 2, E2M1 1
CELLS = [
    "float32",
    *(f"{rounding} {bits}" for bits in BITS for rounding in ("nearest", "unbiased")),
]
WITHIN = 0.05  # of accuracy: "as much"
START = 0.251  # accuracy of the model on the coarsest grid, before training


def rounded(exact: torch.Tensor, bits: int, added: torch.Tensor | int) -> torch.Tensor:
    """Cuts float32 to `bits` of mantissa after `added` was added to its pattern: half a spacing for
    the nearest, a random part of one for no bias.

    >>> rounded(torch.tensor([1.2, 1.3]), 1, added=1 << 21)
    tensor([1.0000, 1.5000])
    """
    cut = 23 - bits
    return ((exact.contiguous().view(torch.int32) + added) >> cut << cut).view(torch.float32)


def nearest(exact: torch.Tensor, bits: int) -> torch.Tensor:
    """On the grid of `bits`, ties away from 0."""
    return rounded(exact, bits, 1 << (22 - bits))


def unbiased(layer: Adapted, bits: int) -> torch.Tensor:
    """The exact sum on the grid of `bits`, by the 16 random bits that lora/rounding.py has for each
    element, here the first ones below the grid.
    """
    sixteen = (layer.dither.down[:, None] * layer.dither.across) >> 16 & 0xFFFF
    return rounded(layer.base + layer.update(), bits, sixteen << (7 - bits))


class Run:
    """GRPO by the quickstart's recipe, with the weights of a cell."""

    def __init__(self, cell: str, seed: int):
        self.recipe = read_recipe(compose("grpo_tiny_moe_cpu", ["aqn=off", f"seed={seed}"]))
        self.rounding, _, bits = cell.partition(" ")
        self.bits, self.seed = int(bits or 7), seed
        recipe, model = self.recipe, ROOT / self.recipe.model.path
        self.tokenizer = load_tokenizer(model)
        self.policy = Policy(model, recipe.lora.r, recipe.lora.alpha, seed=1000 * seed)
        self.layers = self.policy.layers
        for layer in self.layers:
            layer.base = nearest(layer.base, min(BITS))
        self.train, self.test = (
            read_rows(ROOT / file) for file in (recipe.task.train_file, recipe.task.test_file)
        )
        self.order = PromptOrder(len(self.train), seed)
        betas = (recipe.optimizer.adam_beta1, recipe.optimizer.adam_beta2)
        self.optimizer = torch.optim.AdamW(
            self.policy.factors, lr=recipe.optimizer.lr, betas=betas, weight_decay=0
        )

    @torch.no_grad()
    def use(self, side: str) -> None:
        """Makes the model compute as `side` does: sampler, trainer or exact."""
        for layer in self.layers:
            layer.used, layer.beside, layer.through = layer.base, False, False
            if side != "exact" and self.rounding == "unbiased":
                layer.used = unbiased(layer, self.bits)
                layer.through = side == "trainer"
            elif side == "sampler" and self.rounding == "nearest":
                layer.used = nearest(layer.base + layer.update(), self.bits)
            elif side == "trainer":
                layer.beside = True
            else:
                layer.used = layer.base + layer.update()

    @torch.no_grad()
    def answer(self, rows: list[Row], samples: int, seed: int) -> tuple[list, list, np.ndarray]:
        """Samples answers: each one's prompt, its token ids, and its reward."""
        torch.manual_seed(seed)
        end = self.tokenizer.eos_token_id
        prompts, answers = [], []
        for first in range(0, len(rows), 64):
            asked = [plain_ids(self.tokenizer, row) for row in rows[first : first + 64]]
            batch = self.tokenizer.pad({"input_ids": asked}, return_tensors="pt")
            output = self.policy.model.generate(
                **batch,
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                max_new_tokens=self.recipe.sampling.max_tokens,
            )
            for ids in output[:, batch["input_ids"].shape[1] :].tolist():
                answers.append(ids[: ids.index(end) + 1] if end in ids else ids)
            prompts += [prompt for prompt in asked for _ in range(samples)]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        asked_rows = [row for row in rows for _ in range(samples)]
        return prompts, answers, score(self.recipe.task.verifiers, texts, asked_rows)[0]

    def step(self, number: int) -> None:
        """One iteration."""
        recipe, n = self.recipe, self.recipe.batch.samples_per_prompt
        rows = [self.train[row] for row in self.order.take(recipe.batch.global_batch_size)]
        self.use("sampler")
        prompts, answers, rewards = self.answer(rows, n, seed=1000 * self.seed + number)
        batch = build_batch([Answer(*pair, pair[1]) for pair in zip(prompts, answers)])
        mask = torch.from_numpy(batch.mask)
        self.use("trainer")
        found = self.policy.log_probs(torch.from_numpy(batch.tokens), mask)
        log_probs = torch.zeros(mask.shape).masked_scatter(mask, found)
        old = log_probs.detach()
        advantages = group_advantages(torch.from_numpy(rewards), n, recipe.algorithm)
        inputs = LossInputs(log_probs, old, old, advantages, mask)
        total, _ = loss(inputs, recipe.algorithm, recipe.correction)
        self.optimizer.zero_grad()
        (total / denominator(mask, recipe.algorithm)).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.factors, recipe.optimizer.clip_grad)
        self.optimizer.step()

    def accuracy(self, side: str) -> float:
        """Of answers to the held-out questions."""
        self.use(side)
        rewards = self.answer(self.test, self.recipe.evaluation.samples_per_problem, seed=7)[2]
        return round(float(rewards.mean()), 4)

    @torch.no_grad()
    def move(self) -> dict[str, float]:
        """The update beside the grid, and the share of it that is in the sampler's weights."""
        self.use("sampler")
        update = torch.cat([layer.update().flatten() for layer in self.layers])
        moved = torch.cat([(layer.used - layer.base).flatten() for layer in self.layers])
        base = torch.cat([layer.base.flatten() for layer in self.layers])
        spacing = torch.exp2(torch.floor(torch.log2(base.abs())) - self.bits).mean()
        ratio = update.square().mean().sqrt() / spacing
        share = moved @ update / (update @ update)
        return {"ratio": round(ratio.item(), 4), "share": round(share.item(), 4)}


def run_cell(cell: str, seed: int) -> dict:
    """Trains once; returns the accuracies of the sampler's and the exact weights, and `Run.move`."""
    run = Run(cell, seed)
    for number in range(run.recipe.run.train_iters):
        run.step(number)
    return {side: run.accuracy(side) for side in ("sampler", "exact")} | run.move()


def of(kept: dict, cell: str, name: str, less: str = "") -> Estimate:
    """The mean of a number over seeds and its 95 % interval; less: paired with float32's `less`."""
    runs = kept[cell]
    if less:
        both = [(run, kept["float32"][seed]) for seed, run in runs.items()]
        values = [run[name] - other[less] for run, other in both]
    else:
        values = [run[name] for run in runs.values()]
    return estimate(np.array(values)[:, None])


def verdict(difference: Estimate) -> str:
    """A word on a paired difference to float32."""
    if difference.seeds < LEAST_SEEDS:
        return "none yet"
    if difference.high < 0:
        return "less"
    return "as much" if -WITHIN < difference.low < difference.high < WITHIN else "undecided"


def table(kept: dict) -> list[str]:
    """What was found, as Markdown."""
    rows = []
    for cell, runs in kept.items():
        row = [cell, str(len(runs))]
        for name in ("ratio", "share"):
            row.append(f"{of(kept, cell, name).mean:.2f}")
        for name in ("sampler", "exact"):
            row.append(interval(of(kept, cell, name)))
        for name in ("sampler", "exact") if cell != "float32" else ():
            difference = of(kept, cell, name, less="sampler")
            row += [interval(difference, "+"), verdict(difference)]
        rows.append(row + (10 - len(row)) * [""])
    header = ["cell, bits", "seeds", "ratio", "share arrived", "accuracy, sampler", "exact sum"]
    return markdown_table([*header, *(2 * ["less float32's", "verdict"])], rows)


def picture(kept: dict, image: Path) -> None:
    """Draws accuracy by ratio, of each rounding's sampler and of the exact sum."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.subplots()
        float32 = of(kept, "float32", "sampler")
        axes.axhspan(float32.low, float32.high, color="#999999", alpha=0.35, label="float32")
        axes.axhline(START, color="black", linewidth=1, linestyle=":", label="before training")
        for rounding, color in (("nearest", RED), ("unbiased", BLUE)):
            cells = [cell for cell in kept if cell.startswith(rounding)]
            ratios = [of(kept, cell, "ratio").mean for cell in cells]
            for side, line in (("sampler", "o-"), ("exact", "s--")):
                found = [of(kept, cell, side) for cell in cells]
                means = np.array([each.mean for each in found])
                axes.errorbar(
                    ratios,
                    means,
                    yerr=[means - [e.low for e in found], [e.high for e in found] - means],
                    color=color,
                    fmt=line,
                    capsize=3,
                    label=f"{rounding}: {'the sampler' if side == 'sampler' else 'exact sum'}",
                )
        axes.set(
            title="held-out accuracy after 40 steps (bars: 95 % over seeds)",
            xscale="log",
            xlabel="update / spacing of the weights' grid, after the last step",
            ylabel="accuracy",
        )
        ratios = (0.1, 0.3, 1, 3)
        axes.set_xticks(ratios, map(str, ratios))
        axes.minorticks_off()
        axes.legend()
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {cell: {} for cell in CELLS}
    for seed in map(str, arguments.seeds):
        for cell in CELLS:
            if seed not in kept[cell]:
                kept[cell][seed] = run_cell(cell, int(seed))
                write_whole(FILE, json.dumps(kept, indent=1) + "\n")
                print(f"seed {seed}, {cell}: {kept[cell][seed]}", flush=True)
    print("\n".join(table(kept)))
    picture(kept, ROOT / "docs" / "images" / "rounding_study.png")


if __name__ == "__main__":
    main()
