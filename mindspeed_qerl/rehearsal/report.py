"""What a rehearsal showed beside the run's summary, and what it could not."""

from collections.abc import Iterator, Sequence

from mindspeed_qerl.engines import engine_of
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory

from .prepare import layers_to_rehearse


def report(directory: RunDirectory, recipe: Recipe, unused: Sequence[str] = ()) -> str:
    """The report as Markdown, also written to rehearsal.md in the run directory.

    Args:
        recipe: what was rehearsed, before it was made small. unused: its keys that change nothing
            on the engine.
    """
    plan = plan_of(recipe)
    layout = plan.layout
    batch = plan.batch
    shown = (
        f"The layout exists: all {len(RULES)} rules hold, and {layout.world} processes ran it: TP "
        f"{layout.tp} x PP {layout.pp} x DP {layout.dp}, EP {layout.ep}; {batch.global_batch_size} "
        f"prompts x {batch.samples_per_prompt} answers a step, {plan.share} on each of {layout.dp} "
        f"data-parallel ranks in micro-batches of {batch.micro_batch_size}. summary.md has LoRA's "
        "way into the rollout engine, the noise and the evaluations. Not shown:"
    )
    missing = [f"- {line}" for line in _not_shown(recipe, plan, unused)]
    lines = [f"# Rehearsal of {directory.path.parent.name}", shown, *missing]
    text = "\n\n".join(lines) + "\n"
    (directory.path / "rehearsal.md").write_text(text)
    return text


def _not_shown(recipe: Recipe, plan: Plan, unused: Sequence[str]) -> Iterator[str]:
    yield (
        "The NPU: its kernels and their numbers, HCCL, speed, and memory, which "
        "`tools/plan_layout.py` estimates."
    )
    rehearsed = layers_to_rehearse(plan, recipe.rehearsal.layers)
    layers = plan.shape.num_hidden_layers
    if rehearsed < layers:
        yield (
            f"Depth: {rehearsed} of {layers} layers, all of one kind, evenly divided among the "
            "stages; rehearsal.layers=all runs them all."
        )
    yield (
        "The real model: its weights, widths, tokenizer and config.json; answers of real length; "
        "anything about accuracy."
    )
    if engine_of(recipe).UPSTREAM:
        yield (
            "vllm-ascend's kernels: its real code ran, on torch formulas for them "
            "(docs/architecture.md)."
        )
        return
    yield (
        "Upstream's code and bfloat16: this was the local engine, in float32, with one vLLM process "
        f"in the place of infer TP {plan.layout.infer_tp} x EP {plan.layout.infer_ep}. "
        "engine=mindspeed_rl emulate_npu=true runs upstream's own."
    )
    if unused:
        yield f"What {len(unused)} keys do that the local engine does not use: {', '.join(unused)}."
