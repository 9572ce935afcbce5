"""Measures what a policy does with LoRA's updates: how much of the change of its log-probs shows,
by the way in which trainer and sampler round.

    make real-model                                          # SmolLM2-135M
    python benchmarks/arrival.py --data gsm8k/train.jsonl    # 3 hours on one core
    python benchmarks/arrival.py --tables                    # of docs/studies/arrival.json

A trainer in float32 makes updates like a policy gradient's (right answers up, other questions'
answers down), and its adapters after 1, 10, 50 and 116 of them are kept. The truth is what they do
in float32 to the log-probs of answers that stay the same; each arm computes these again:

    slope = <shown, truth> / <truth, truth>    1: in the mean all of the update shows; 0: nothing

Its standard error is by jackknife over answers, whose tokens vary together; of unbiased weights it
includes what other random bits would change, by the gradient of the slope. k3 is that of runs'
`mismatch/k3`, of the sampler to the trainer.

Weights: merged, rounded to `nearest` or `unbiased` (lora/rounding.py), or the base with adapters
`beside`; and the same in NVFP4. Arithmetic: `float32`; `trainer`, transformers' operators in
bfloat16, each of which rounds; `sampler`, bfloat16 as in fused kernels, which round where one hands
over to the next. Both multiply bfloat16's numbers by float32's kernels, sum in float32 and round
once, which is faster on a processor without bfloat16. No engine's own kernels are run.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, silu

from mindspeed_qerl.common.files import write_whole
from mindspeed_qerl.common.markdown import markdown_table
from mindspeed_qerl.local.batch import Answer, build_batch
from mindspeed_qerl.lora.arrival import variance_of_rounding
from mindspeed_qerl.lora.proof import join, movement
from mindspeed_qerl.lora.rounding import dither_of, merged
from mindspeed_qerl.quantization.formats import quantize_nvfp4
from mindspeed_qerl.quantization.weights import LINEARS
from mindspeed_qerl.runs.plots import BLUE, GREEN, ORANGE, RED, STYLE
from mindspeed_qerl.tasks.prompts import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "studies" / "arrival.json"
R, ALPHA, LR, BETAS = 32, 64, 5e-6, (0.9, 0.95)  # the NPU configs'
MARKS = (1, 10, 50, 116)
QUESTION, ANSWER = 32, 64  # tokens at most: the last ones, the first ones
# folder in models/, pairs of a right and a wrong answer in an update, answers that are asked about
# after so many updates: more where the change is small
MODELS = {
    "SmolLM2-135M": ("smollm2_135m_instruct", 2, {64: (50, 116), 256: (1, 10)}),
    "tiny mixture": ("tiny_qwen3_moe", 16, {2000: MARKS}),
}
TRUTH = ("float32", "beside")
# (arithmetic, weights): colour and line in the picture
ARMS = {
    ("sampler", "unbiased"): (BLUE, "o-"),
    ("trainer", "unbiased"): (BLUE, "s--"),
    ("sampler", "nearest"): (RED, "o-"),
    ("trainer", "beside"): (RED, "s--"),
    ("float32", "unbiased"): (BLUE, "o-"),
    ("float32", "nearest"): (RED, "o-"),
    ("float32", "NVFP4 beside"): (GREEN, "^-"),
    ("float32", "NVFP4 merged"): (ORANGE, "v-"),
    ("sampler", "beside"): (GREEN, "^-"),
}
# weights of (trainer, sampler)
PAIRS = {
    "shipped": ("unbiased", "unbiased"),
    "before": ("beside", "nearest"),
    "sampler alone mended": ("beside", "unbiased"),
    "beside, both": ("beside", "beside"),
}


def on_grid(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to bfloat16's grid."""
    return x.bfloat16().float()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T, summed in float32 and rounded once to the dtype of `x`."""
    return linear(x.float(), weight.float()).to(x.dtype)


class Adapted(nn.Module):
    """A linear layer without bias, and its adapter.

    Attributes:
        used: the weights that it multiplies with. beside: the adapter's product is added. through:
            it is in that of `used`, and its gradient goes to the adapter.
    """

    def __init__(self, layer: nn.Linear, name: str, r: int, alpha: float, seed: int):
        super().__init__()
        self.base, self.scaling = layer.weight.detach(), alpha / r
        outputs, inputs = self.base.shape
        bound = 1 / math.sqrt(inputs)
        generator = torch.Generator().manual_seed(seed)
        # no parameters of the model, so that they stay float32
        self.A = torch.empty(r, inputs).uniform_(-bound, bound, generator=generator)
        self.B = torch.zeros(outputs, r)
        self.dither = dither_of(f"{name}.weight", self.base.shape)
        self.used, self.beside, self.through = self.base, True, False

    def update(self) -> torch.Tensor:
        """(alpha / r) B A."""
        return self.scaling * (self.B @ self.A)

    def weights(self, kind: str) -> torch.Tensor:
        """What an arm multiplies with, float32."""
        if kind.endswith("beside"):
            weight = self.base
        elif kind == "nearest":
            weight = on_grid(self.base + self.update())
        else:
            base = self.base.bfloat16()
            weight = merged(base, self.B, self.A, self.scaling, self.dither).float()
        return quantize_nvfp4(weight) if "NVFP4" in kind else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = product(x, self.used)
        if self.through and torch.is_grad_enabled():
            added = self._added(x.detach())
            return output + (added - added.detach())
        return output + self._added(x) if self.beside else output

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        return product(self.scaling * product(x, self.A.to(x.dtype)), self.B.to(x.dtype))


class Experts(nn.ModuleList):
    """Computes what Qwen3MoeExperts does by a linear layer for each matrix of each expert, named as
    in checkpoints.
    """

    def __init__(self, stacked: nn.Module):
        super().__init__()
        for gate_up, down in zip(stacked.gate_up_proj, stacked.down_proj):
            expert = nn.ModuleDict()
            weights = zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down))
            for name, weight in weights:
                expert[name] = nn.Linear(*weight.shape[::-1], bias=False)
                expert[name].weight = nn.Parameter(weight.detach().contiguous(), False)
            self.append(expert)

    def forward(
        self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            rows, place = torch.where(chosen == number)
            x = hidden[rows]
            y = expert["down_proj"](silu(expert["gate_proj"](x)) * expert["up_proj"](x))
            output.index_add_(0, rows, (y * weights[rows, place, None]).to(output.dtype))
        return output


class Policy:
    """A model of transformers on bfloat16's grid, all of whose linear layers are adapted.

    Attributes:
        fused: as in fused kernels, linear layers, norms and decoder layers hand over rounded
            numbers, and compute in float32 between.
    """

    def __init__(self, folder: Path, r: int = R, alpha: float = ALPHA, seed: int = 0):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self._convert(torch.bfloat16)
        self._convert(torch.float32)
        self.head, self.layers = self.model.lm_head.weight.clone(), []
        for name, module in list(self.model.named_modules()):
            if name.endswith("mlp.experts"):
                self.model.set_submodule(name, Experts(module))
        for name, module in list(self.model.named_modules()):
            if name.endswith(LINEARS):
                self.layers.append(Adapted(module, name, r, alpha, seed + len(self.layers)))
                self.model.set_submodule(name, self.layers[-1])
        self.factors = [factor for layer in self.layers for factor in (layer.A, layer.B)]
        for factor in self.factors:
            factor.requires_grad_()
        self.fused = False
        for module in self.model.modules():
            kind = type(module).__name__
            if kind.endswith(("Adapted", "RMSNorm")):
                module.register_forward_pre_hook(self._given)
            if kind.endswith(("Adapted", "RMSNorm", "DecoderLayer")):
                module.register_forward_hook(self._returned)

    def _given(self, module: nn.Module, args: tuple) -> tuple | None:
        return (on_grid(args[0]), *args[1:]) if self.fused else None

    def _returned(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return on_grid(output) if self.fused else output

    def log_probs(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """float32 [tokens of all answers]."""
        hidden = self.model.model(ids).last_hidden_state[:, :-1][mask]
        logits = product(hidden, self.head)
        if self.fused:
            logits = on_grid(logits)
        return logits.float().log_softmax(-1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]

    @torch.no_grad()
    def probe(self, arm: tuple[str, str], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`log_probs` as an arm computes them."""
        arithmetic, weights = arm
        for layer in self.layers:
            layer.used, layer.beside = layer.weights(weights), weights.endswith("beside")
        if arithmetic == "trainer":
            self._convert(torch.bfloat16)
        found = []
        self.fused = arithmetic == "sampler"
        for rows, asked in zip(ids.split(16), mask.split(16)):
            found.append(self.log_probs(rows, asked))
        self.fused = False
        self._convert(torch.float32)
        return torch.cat(found)

    def _convert(self, dtype: torch.dtype) -> None:
        """All but adapted layers; to bfloat16's grid and back nothing more is lost."""
        for parameter in self.model.parameters():
            parameter.data = parameter.to(dtype)

    def of_weights(self, ids: torch.Tensor, mask: torch.Tensor, truth: torch.Tensor) -> dict:
        """Returns the shares of the update that rounded weights have (lora/proof.py), and the
        standard error that other random bits give the slope.
        """
        for layer in self.layers:
            layer.used, layer.beside = layer.base.clone().requires_grad_(), False
        first = 0
        for rows, asked in zip(ids.split(8), mask.split(8)):
            found = self.log_probs(rows, asked)
            (found @ truth[first : first + len(found)]).backward()
            first += len(found)
        moved, variance = defaultdict(list), 0.0
        with torch.no_grad():
            for layer in self.layers:
                base, update = layer.base.bfloat16(), layer.update()
                for kind in ("nearest", "unbiased"):
                    weight = layer.weights(kind).bfloat16()
                    moved[kind].append({"": movement(weight, base, update, layer.dither)})
                each = variance_of_rounding(layer.base + update, update, 2**-7)
                variance += (each * layer.used.grad.square()).sum().item()
        shares = {kind: join(parts)[""]["arrived"] for kind, parts in moved.items()}
        return shares | {"other bits": math.sqrt(variance) / truth.square().sum().item()}


def batch_of(tokenizer, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [pairs, length] of questions and their answers, and where the next token is one of
    the answer, [pairs, length - 1].
    """
    questions = [tokenizer(question + "\n").input_ids[-QUESTION:] for question, _ in pairs]
    answers = [tokenizer(answer).input_ids[:ANSWER] for _, answer in pairs]
    batch = build_batch([Answer(*pair, pair[1]) for pair in zip(questions, answers)])
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.mask)


def record(policy: Policy, tokenizer, rows: list[dict], pairs: int) -> dict[int, list]:
    """Trains in float32; returns the adapters before the first update and after MARKS."""
    optimizer = torch.optim.AdamW(policy.factors, lr=LR, betas=BETAS, weight_decay=0)
    advantages = torch.tensor(pairs * [1.0] + pairs * [-1.0])
    recorded = {}
    for update in range(MARKS[-1] + 1):
        if update:
            chosen = range(pairs * update, pairs * (update + 1))
            right = [rows[number % len(rows)] for number in chosen]
            others = [rows[(number + 37) % len(rows)] for number in chosen]
            asked = [(row["question"], row["answer"]) for row in right]
            asked += [(row["question"], other["answer"]) for row, other in zip(right, others)]
            ids, mask = batch_of(tokenizer, asked)
            weights = advantages[:, None].expand(mask.shape)[mask]
            optimizer.zero_grad()
            (-(weights * policy.log_probs(ids, mask)).mean()).backward()
            nn.utils.clip_grad_norm_(policy.factors, 1.0)
            optimizer.step()
        if update in (0, *MARKS):
            recorded[update] = [factor.detach().clone() for factor in policy.factors]
            print(f"{update} updates", flush=True)
    return recorded


def start_of(arm: tuple[str, str]) -> tuple[str, str]:
    """An arm that computes the same before the first update."""
    return arm[0], "NVFP4 beside" if "NVFP4" in arm[1] else "beside"


def probes(name: str, data: Path, folder: Path) -> list[dict]:
    """Returns for each number of answers the log-probs by (mark, arm), the number of each token's
    answer, and `of_weights` by mark; kept in `folder`, where what is there is not computed again.
    """
    directory, pairs, asked = MODELS[name]
    model, folder = ROOT / "models" / directory, folder / directory
    tokenizer, policy = load_tokenizer(model), Policy(model)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    updates = folder / "updates.pt"
    if not updates.exists():
        torch.save(record(policy, tokenizer, rows[: -max(asked)], pairs), updates)
    recorded = torch.load(updates)
    return [
        probes_of(policy, tokenizer, rows[-count:], recorded, marks, folder / f"probes_{count}.pt")
        for count, marks in asked.items()
    ]


def probes_of(
    policy: Policy,
    tokenizer,
    rows: list[dict],
    recorded: dict[int, list],
    marks: tuple[int, ...],
    file: Path,
) -> dict:
    """Returns what `probes` does, of the answers of `rows` after `marks` updates."""
    found = torch.load(file, weights_only=False) if file.exists() else {"probes": {}, "weights": {}}
    answers = [row["answer"] for row in rows]
    ids, mask = batch_of(tokenizer, [(row["question"], row["answer"]) for row in rows])
    found["answer"] = np.unique(answers, return_inverse=True)[1][mask.nonzero()[:, 0]]
    for mark in (0, *marks):
        for mine, kept in zip(policy.factors, recorded[mark]):
            mine.data.copy_(kept)
        for arm in (TRUTH, *ARMS):
            if (mark, arm) in found["probes"] or mark == 0 and arm != start_of(arm):
                continue
            found["probes"][mark, arm] = policy.probe(arm, ids, mask)
            torch.save(found, file)
            print(f"{file.stem}, {mark} updates: {' '.join(arm)}", flush=True)
        if mark and mark not in found["weights"]:
            truth = found["probes"][mark, TRUTH] - found["probes"][0, TRUTH]
            found["weights"][mark] = policy.of_weights(ids, mask, truth)
            torch.save(found, file)
    return found


def ratio(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """sum(above) / sum(below), [answers] each, and its standard error by jackknife.

    >>> ratio(np.array([1.0, 2.0, 3.0]), np.ones(3))
    (2.0, 0.5773502691896257)
    """
    without = (above.sum() - above) / (below.sum() - below)
    spread = np.square(without - without.mean()).sum() * (len(above) - 1) / len(above)
    return float(above.sum() / below.sum()), float(np.sqrt(spread))


def summary(found: dict) -> dict[str, dict[str, list[float]]]:
    """Returns what docs/studies/arrival.json has of a model: rows of a table, by updates; a slope
    with its standard error and the correlation of shown and truth, k3 with its standard error.
    """
    answer, marks = found["answer"], sorted(found["weights"])
    tokens = np.bincount(answer)
    probes = {key: values.double().numpy() for key, values in found["probes"].items()}
    rows: dict[str, dict[str, list[float]]] = defaultdict(dict)

    def put(name: str, mark: int, *values: float) -> None:
        rows[name][str(mark)] = [float(f"{value:.4g}") for value in values]

    def change(mark: int, arm: tuple[str, str]) -> np.ndarray:
        return probes[mark, arm] - probes[0, start_of(arm)]

    for mark in marks:
        weights, truth = dict(found["weights"][mark]), change(mark, TRUTH)
        other_bits = weights.pop("other bits")
        put("change of the truth, nats rms", mark, np.sqrt(np.square(truth).mean()))
        for kind, share in weights.items():
            put(f"share of the update in the weights, {kind}", mark, share)
        for arm in ARMS:
            shown = change(mark, arm)
            sums = [np.bincount(answer, weights=each * truth) for each in (shown, truth)]
            slope, error = ratio(*sums)
            if arm[1] == "unbiased":
                error = math.hypot(error, other_bits)
            put(", ".join(arm), mark, slope, error, np.corrcoef(shown, truth)[0, 1])
    for mark in (0, *marks):
        k3 = {}
        for name, pair in PAIRS.items():
            arms = [arm if mark else start_of(arm) for arm in zip(("trainer", "sampler"), pair)]
            apart = probes[mark, arms[0]] - probes[mark, arms[1]]
            k3[name] = np.bincount(answer, weights=np.expm1(apart) - apart)
        k3["shipped - before"] = k3["shipped"] - k3["before"]
        for name, sums in k3.items():
            put(f"k3, {name}", mark, *ratio(sums, tokens))
        put("answers", mark, len(tokens))
        put("tokens", mark, len(answer))
    return rows


def table(model: str, rows: dict[str, dict[str, list[float]]]) -> list[str]:
    """What was found of a model, as Markdown."""
    forms = ("{:.4g}", "{:.2g} ± {:.1g}", "{:.2f} ± {:.2f} ({:.2f})")
    lines = []
    for name, by_mark in rows.items():
        found = [by_mark.get(str(mark), []) for mark in (0, *MARKS)]
        cells = [forms[len(values) - 1].format(*values) if values else "" for values in found]
        lines.append([name, *cells])
    return ["", *markdown_table([f"{model}, after updates", *map(str, (0, *MARKS))], lines)]


def picture(rows: dict[str, dict[str, list[float]]], image: Path) -> None:
    """Draws the slope by updates: weights alone rounded, and all in bfloat16."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4), layout="constrained")
        alone, everything = figure.subplots(1, 2, sharey=True)
        alone.set(title="weights alone rounded", ylabel="slope: shown / truth")
        everything.set(title="all in bfloat16")
        for number, (arm, (color, line)) in enumerate(ARMS.items()):
            axes = alone if arm[0] == "float32" else everything
            found = np.array([rows[", ".join(arm)][str(mark)] for mark in MARKS])
            axes.errorbar(
                np.array(MARKS) * 1.04 ** (number % 5),  # beside each other
                found[:, 0],
                yerr=2 * found[:, 1],
                color=color,
                fmt=line,
                capsize=3,
                label=", ".join(arm),
            )
        for axes in (alone, everything):
            axes.axhline(1, color="black", linewidth=1, linestyle=":")
            axes.set(xscale="log", xlabel="updates (bars: two standard errors)", ylim=(-0.5, 2.5))
            axes.set_xticks(MARKS, map(str, MARKS))
            axes.minorticks_off()
            axes.legend()
        figure.savefig(image, dpi=130)
    print(image)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="JSONL", help="GSM8K's train.jsonl")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "arrival")
    parser.add_argument("--tables", action="store_true", help="of what was found before")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    own = ROOT / "models" / MODELS["tiny mixture"][0] / "data" / "raw" / "train.jsonl"
    for name, data in (("tiny mixture", own), ("SmolLM2-135M", arguments.data)):
        if data and not arguments.tables:
            kept[name] = defaultdict(dict)
            for found in probes(name, data, arguments.folder):
                for row, by_mark in summary(found).items():
                    kept[name][row] |= by_mark
            write_whole(FILE, json.dumps(kept, indent=1) + "\n")
    for name, rows in kept.items():
        print("\n".join(table(name, rows)))
    if "SmolLM2-135M" in kept:
        picture(kept["SmolLM2-135M"], ROOT / "docs" / "images" / "arrival_policy.png")


if __name__ == "__main__":
    main()
