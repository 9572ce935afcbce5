"""What a rehearsal proved, and what it could not."""

from collections.abc import Iterator, Sequence

from mindspeed_qerl.engines import engine_of
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.rules import RULES
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

from .prepare import layers_to_rehearse


def report(directory: RunDirectory, recipe: Recipe, unused: Sequence[str] = ()) -> str:
    """The report as Markdown, also written to rehearsal.md in the run directory.

    Args:
        recipe: what was rehearsed, before it was made small. unused: its keys that change nothing
            on the engine.
    """
    plan = plan_of(recipe)
    status = directory.status()
    title = f"# Rehearsal of {directory.path.parent.name}: {status['state']}"
    lines = [title, "", f"{status['seconds']:.0f} s.", "", "## Proved here", ""]
    lines += [f"- {line}" for line in _proved(recipe, plan, directory)]
    lines += ["", "## Not proved here", ""]
    lines += [f"- {line}" for line in _not_proved(recipe, plan, directory, unused)]
    text = "\n".join(lines) + "\n"
    (directory.path / "rehearsal.md").write_text(text)
    return text


def _proved(recipe: Recipe, plan: Plan, directory: RunDirectory) -> Iterator[str]:
    layout = plan.layout
    batch = plan.batch
    shape = plan.shape
    steps = read_jsonl(directory.metrics_file)
    last = steps[-1]
    experts = ""
    if shape.moe:
        experts = f", {shape.num_experts // (layout.tp * layout.ep)} of {shape.num_experts} experts"
    yield (
        f"The layout exists: all {len(RULES)} rules hold, and {layout.world} processes ran it: TP "
        f"{layout.tp} x PP {layout.pp} x DP {layout.dp}, EP {layout.ep}. On each "
        f"{shape.num_attention_heads // layout.tp} heads, {shape.num_key_value_heads // layout.tp} "
        f"KV groups{experts}."
    )
    yield (
        f"The batch arithmetic: {batch.global_batch_size} prompts x {batch.samples_per_prompt} "
        f"answers a step, {plan.share} on each of {layout.dp} data-parallel ranks in micro-batches "
        f"of {batch.micro_batch_size}, {batch.global_batch_size // batch.mini_batch_size} "
        f"update(s) a step; {len(steps)} steps."
    )
    if movement := directory.facts().get("lora_movement"):
        shares = [f"{each['arrived']:.1%} of {name}'s update" for name, each in movement.items()]
        yield f"LoRA reached the rollout engine: {', '.join(shares)}."
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
    evaluated = " and ".join(str(row["step"]) for row in read_jsonl(directory.eval_file))
    yield f"Evaluation ran after {evaluated} steps, noise off."


def _not_proved(
    recipe: Recipe, plan: Plan, directory: RunDirectory, unused: Sequence[str]
) -> Iterator[str]:
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
        "Upstream's code: this was the local engine. With engine=mindspeed_rl emulate_npu=true "
        "the same rehearsal runs upstream's own."
    )
    yield (
        f"vLLM's layout, infer TP {plan.layout.infer_tp} x EP {plan.layout.infer_ep}: its rules "
        "were checked, but one vLLM process sampled here."
    )
    yield "BF16: this was computed in float32."
    if not directory.facts().get("lora_movement"):
        yield "LoRA's way into the rollout engine: no reward differed, so no adapter moved."
    if unused:
        yield f"What {len(unused)} keys do that the local engine does not use: {', '.join(unused)}."
