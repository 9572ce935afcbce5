"""What a rehearsal proved, and what it could not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_qerl.engines import engine_of
from mindspeed_qerl.layout.memory import estimate, settings_of, terms
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.rehearsal.prepare import layers_to_rehearse, upstream_verifiers
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

# Of a term measured on a rank and the planner's formula for the same narrow model. They count the
# same tensors; what may differ is what is rounded up (Megatron's buckets to 64 numbers and to the
# ranks that share them, vLLM's buffer to 128 bits), which weighs most in a narrow model, and small
# temporary tensors of the sync.
BOUND = 1.25


def report(directory: RunDirectory, recipe: Recipe, unused: Sequence[str] = ()) -> str:
    """The report as Markdown, also written to rehearsal.md in the run directory.

    Args:
        recipe: what was rehearsed, before it was made small. unused: its keys that change nothing
            on the engine.
    """
    plan, facts = plan_of(recipe), directory.facts()
    steps, evaluations = read_jsonl(directory.metrics_file), read_jsonl(directory.eval_file)
    seconds = f"{facts['train_seconds']:.0f} s in all"
    if "engine_start_seconds" in facts:
        seconds += f", {facts['engine_start_seconds']:.0f} s of them to start the processes"
    seconds += f", {sum(row['time/step'] for row in steps) / len(steps):.0f} s a step"
    if "peak_memory_gib" in facts:
        seconds += (
            f"; {facts['peak_memory_gib']:.1f} GiB of memory at most, of all processes together"
        )
    lines = [
        f"# Rehearsal of {directory.path.parent.name}: {directory.status()['state']}",
        "",
        seconds + ".",
        "",
        "## Proved here",
        "",
        *(f"- {line}" for line in _proved(recipe, plan, facts, steps, evaluations)),
        "",
        *_memory(recipe, directory, facts),
        "## Not proved here",
        "",
        *(f"- {line}" for line in _not_proved(recipe, plan, facts, unused)),
        "",
    ]
    text = "\n".join(lines)
    (directory.path / "rehearsal.md").write_text(text)
    return text


def _memory(recipe: Recipe, directory: RunDirectory, facts: Mapping[str, Any]) -> Iterator[str]:
    if "memory" in facts:
        (narrow, of_narrow), (real, of_real) = (
            (plan_of(each), settings_of(each)) for each in (read_recipe(directory.config()), recipe)
        )
        formulas = [terms(estimate(narrow, of_narrow, rank["stage"])) for rank in facts["memory"]]
        yield from memory_table(facts["memory"], formulas, terms(estimate(real, of_real)))


def memory_table(
    ranks: Sequence[Mapping[str, int]],
    formulas: Sequence[Mapping[str, int]],
    real: Mapping[str, int],
) -> Iterator[str]:
    """What ranks measured (ascend/measure.py) beside the planner's formulas, bytes: of each term
    the rank that is farthest from its formula, a warning if that is beyond BOUND, and for what did
    not come back.

    Args:
        formulas: `terms` of the narrow model, for each rank. real: of the real one's fullest rank.
    """
    yield from (
        "## Memory, measured and planned",
        "",
        (
            "| bytes of a rank | measured here | planned for this model | measured / planned | the "
            "real model |"
        ),
        "|---|---|---|---|---|",
    )
    warnings = []
    for term in real:
        found = [(rank[term], formula[term]) for rank, formula in zip(ranks, formulas)]
        measured, formula = max(found, key=lambda pair: distance(*pair))
        yield f"| {term} | {measured:,} | {formula:,} | {ratio(measured, formula)} | {real[term]:,} |"
        if distance(measured, formula) > BOUND:
            warnings.append(
                f"{term}: a rank allocated {measured:,} bytes, and the planner's formula says "
                f"{formula:,} for this narrow model. What it says of the real one is as wrong."
            )
    for term in ("adapters", "gradients"):
        warnings += [
            f"{term}: {rank[term]:,} bytes were offloaded, {rank[f'{term}, back']:,} came back."
            for rank in ranks
            if rank[term] != rank[f"{term}, back"]
        ]
    yield ""
    yield from (f"**Warning**: {warning}\n" for warning in warnings)


def distance(measured: int, formula: int) -> float:
    """How many times the larger is the smaller one, at least 1."""
    low, high = sorted((measured, formula))
    return high / low if low else 1.0 if not high else math.inf


def ratio(measured: int, formula: int) -> str:
    return f"{measured / formula:.2f}" if formula else "–"


def _proved(
    recipe: Recipe, plan: Plan, facts: Mapping[str, Any], steps: list[dict], evaluations: list[dict]
) -> Iterator[str]:
    layout, batch, shape, last = plan.layout, plan.batch, plan.shape, steps[-1]
    asked, there = recipe.rehearsal.layers, sorted(set(plan.layers))
    here = there if asked == "all" else [layers_to_rehearse(plan, asked) // layout.pp]
    experts = (
        f", {shape.num_experts // (layout.tp * layout.ep)} of {shape.num_experts} experts"
        if shape.moe
        else ""
    )
    layers = " of ".join(
        " or ".join(map(str, counts)) for counts in ([here, there] if here != there else [there])
    )
    yield (
        f"The layout exists: all {len(RULES)} rules hold, and {layout.world} processes ran it: TP "
        f"{layout.tp} x PP {layout.pp} x DP {layout.dp}, EP {layout.ep}. On each "
        f"{shape.num_attention_heads // layout.tp} heads, {shape.num_key_value_heads // layout.tp} "
        f"KV groups{experts}, {layers} layers."
    )
    yield (
        f"The batch arithmetic: {batch.global_batch_size} prompts x {batch.samples_per_prompt} "
        f"answers a step, {plan.share} on each of {layout.dp} data-parallel ranks in micro-batches "
        f"of {batch.micro_batch_size}, {batch.global_batch_size // batch.mini_batch_size} "
        f"update(s) a step; {len(steps)} steps."
    )
    yield (
        "LoRA trains "
        + ", ".join(
            f"{target}: {count['modules']} modules" for target, count in facts["lora"].items()
        )
        + "."
    )
    if moved := facts.get("lora_movement"):
        yield (
            "Every LoRA target reached the rollout engine: "
            + ", ".join(
                f"{target} moved {entry['moved']:.3g} of {entry['expected']:.3g}"
                for target, entry in moved.items()
            )
            + "."
        )
    if last.get("aqn/sigma"):
        yield (
            f"AQN fired: noise on {last['aqn/layers']:.0f} RMSNorm layers in step {last['step']}, "
            f"sigma {last['aqn/sigma']:.3g}, measured {last['aqn/measured_std']:.3g}."
        )
    if recipe.quantization.enabled:
        yield (
            f"Rollouts were in {recipe.quantization.format}: in step {last['step']} the weights "
            f"were {last['quantization/weight_error']:.2%} off what was synced."
        )
    yield (
        "The verifier scored answers to the task's own questions: mean reward "
        f"{last['reward/mean']:.3f} in the last step (random weights that say numbers; it means "
        "nothing more)."
    )
    yield f"Evaluation ran after {' and '.join(str(row['step']) for row in evaluations)} steps, noise off."


def _not_proved(
    recipe: Recipe, plan: Plan, facts: Mapping[str, Any], unused: Sequence[str]
) -> Iterator[str]:
    yield "The NPU: its kernels and their numbers, HCCL, speed, and memory, which `tools/plan_layout.py` estimates."
    if (
        rehearsed := layers_to_rehearse(plan, recipe.rehearsal.layers)
    ) < plan.shape.num_hidden_layers:
        yield (
            f"Depth: {rehearsed} of {plan.shape.num_hidden_layers} layers, all of one kind, evenly "
            "divided among the stages; rehearsal.layers=all runs them all."
        )
    yield (
        "The real model: its weights, widths, tokenizer and config.json; answers of real length; "
        "anything about accuracy."
    )
    if engine_of(recipe).UPSTREAM:
        yield "vllm-ascend's kernels: its code ran, on torch formulas for them (docs/architecture.md)."
        return
    yield (
        "Upstream's code: this was the local engine. With engine=mindspeed_rl emulate_npu=true "
        "the same rehearsal runs upstream's own."
    )
    yield (
        f"vLLM's layout, infer TP {plan.layout.infer_tp} x EP {plan.layout.infer_ep}: its rules "
        "were checked, but one vLLM process sampled here."
    )
    yield "BF16: this was computed in float32."
    if names := upstream_verifiers(recipe):
        yield f"Upstream's verifiers {', '.join(names)}: only upstream's code has them."
    if not facts.get("lora_movement"):
        yield "LoRA's way into the rollout engine: no reward differed, so no adapter moved."
    if unused:
        yield f"What {len(unused)} keys do that the local engine does not use: {', '.join(unused)}."
