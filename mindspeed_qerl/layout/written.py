"""Configs for NPUs as text: of a plan with its memory what configs/base/npu.yaml leaves open, each
value with where it comes from; and the part of configs/model/ of a model that has none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.families import ModelShape, family_of

from .memory import Memory
from .parts import GB
from .plan import VLLM_VOCABULARY_MULTIPLE
from .planner import EVALUATED, dispatched
from .time import Terms, iteration, total

PROMPT = 512  # tokens at most, as configs/base/npu.yaml has it
RANK_CPUS = 4  # rl_config.num_cpus_for_placement_group of configs/base/npu.yaml
OTHER_CPUS = 12  # of the transfer dock, the driver and a reward (ascend/limits.py:needed_cpus)
COLUMN = 33  # where comments begin
# What Megatron is told of every model beside its family's arguments.
SAME = {
    "make_vocab_size_divisible_by": 1,
    "attention_softmax_in_fp32": True,
    "no_gradient_accumulation_fusion": True,
}
EXPERTS = {
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": True,
    "moe_permutation_async_comm": True,
    "moe_token_dispatcher_type": "alltoall_seq",
}
LOAD = (
    "${megatron_training.tokenizer_name_or_path}-tp${actor_config.tensor_model_parallel_size}"
    "-pp${actor_config.pipeline_model_parallel_size}"
)
Lines = list[tuple[str, Any, str]]  # key, value, comment


@dataclass(frozen=True)
class Wanted:
    """Describes a config beside its plan: `rows` of the training file; what is None is the model's
    or the base's.
    """

    title: str  # of the model
    part: str  # its file in configs/model/
    rows: int
    prompt: int | None = None  # tokens at most
    answer: int | None = None
    train_file: str | None = None
    data_path: str | None = None


def config_text(memory: Memory, wanted: Wanted, terms: Terms) -> str:
    """The text of a config for a plan that fits."""
    plan = memory.plan
    layout = plan.layout
    seconds = "-".join(f"{value:.0f}" for value in total(iteration(memory, terms)))
    head = (
        f"# {wanted.title} on {layout.world} dies, {layout.nodes} x {layout.node_width}: "
        f"TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}; "
        f"vLLM {layout.infer_tp} x {layout.infer_ep}. By tools/plan_layout.py.\n"
        f"# At most {memory.peak / GB:.0f} of {memory.capacity / GB:.0f} GB outside a rollout, "
        f"{seconds} s an iteration: computed, never measured.\n"
        f"defaults:\n  - base: npu\n  - model: {wanted.part}\n  - _self_\n"
    )
    sections = {
        "megatron_training": _training(memory, wanted),
        "actor_config": _layout(memory),
        "rl_config": _resources(memory, wanted, terms),
        "generate_config": _rollout(memory, wanted),
        "npu": _nodes(memory),
        "task": [("train_file", wanted.train_file, "test_file and reward: yours, too")],
    }
    return head + "".join(map(_section, sections.items()))


def _nodes(memory: Memory) -> Lines:
    layout = memory.plan.layout
    return [("ranks_per_node", layout.node_width, "dies of each")] if layout.nodes > 1 else []


def _section(section: tuple[str, Lines]) -> str:
    name, lines = section
    text = ""
    for key, value, why in lines:
        if value is None:
            continue
        place, _, key = key.rpartition(".")
        indent = "  "
        if place:
            text += f"  {place}:\n"
            indent = "    "
        line = f"{indent}{key}: {_yaml(value)}"
        text += f"{line:{COLUMN}}  # {why}\n" if why else f"{line}\n"
    return f"\n{name}:\n{text}" if text else ""


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, float) and value else str(value)


def _training(memory: Memory, wanted: Wanted) -> Lines:
    plan = memory.plan
    layout = plan.layout
    prompts = plan.batch.global_batch_size
    steps = max(wanted.rows // prompts, 1)
    layers = max(plan.layers)
    recomputes = memory.settings.recompute_layers >= layers
    by_model = plan.shape.moe  # configs/model/ has recomputing where there are experts
    own_lengths = wanted.prompt or wanted.answer
    lines: Lines = [
        ("train_iters", steps, f"{steps} x {prompts} prompts: once through {wanted.rows:,} rows"),
        (
            "global_batch_size",
            prompts,
            f"dealt to DP {layout.dp}, vLLM replicas: {layout.infer_dp}, nodes: {layout.nodes}",
        ),
        ("seq_length", own_lengths and plan.batch.seq_length, "prompt and answer"),
        ("data_path", wanted.data_path, "tools/pack_task.py --data-path"),
        ("sequence_parallel", layout.tp > 1 or None, "TP above 1"),
    ]
    if recomputes and not by_model:
        why = f"{memory.peak / GB:.0f} GB; kept activations do not fit, or cost as much"
        lines += [("recompute_granularity", "full", why), ("recompute_method", "block", "")]
    if recomputes and (layout.pp > 1 or not by_model):
        lines.append(("recompute_num_layers", layers, "all of a stage's"))
    return lines


def _layout(memory: Memory) -> Lines:
    shape = memory.plan.shape
    layout = memory.plan.layout
    heads = f"{shape.num_attention_heads // layout.tp} heads, "
    heads += f"{shape.num_key_value_heads // layout.tp} KV heads a rank"
    lines: Lines = [
        ("tensor_model_parallel_size", layout.tp, heads),
        ("pipeline_model_parallel_size", layout.pp, f"{max(memory.plan.layers)} layers a stage"),
    ]
    if shape.moe:
        experts = shape.num_experts // (layout.tp * layout.ep)
        why = f"{experts} experts a rank, each on {layout.expert_dp} ranks"
        lines.append(("expert_model_parallel_size", layout.ep, why))
    return lines


def _resources(memory: Memory, wanted: Wanted, terms: Terms) -> Lines:
    plan = memory.plan
    settings = memory.settings
    world = plan.layout.world
    tokens = plan.batch.update_max_packing_token_size
    share = plan.share * (terms.prompt + terms.answer)
    cpus = f"dies; {world} x {RANK_CPUS} + {OTHER_CPUS} = {world * RANK_CPUS + OTHER_CPUS} logical CPUs"
    asked = dispatched(plan.shape, settings.max_num_seqs)
    buffer = settings.hccl_buffer_mib if plan.shape.moe else None
    return [
        ("actor_resource.num_npus", world, cpus),
        (
            "hccl_buffersize",
            buffer,
            f"MiB; CANN asks for {asked:.0f} for {settings.max_num_seqs} sequences at once",
        ),
        (
            "update_max_packing_token_size",
            tokens,
            f"{plan.share} answers of a rank are {-(-share // tokens):.0f} rows",
        ),
        ("max_prompt_length", wanted.prompt, "tokens; longer prompts are left out"),
    ]


def _rollout(memory: Memory, wanted: Wanted) -> Lines:
    plan = memory.plan
    shape = plan.shape
    layout = plan.layout
    batch = plan.batch
    settings = memory.settings
    eager = settings.enforce_eager or None
    groups = layout.world // (layout.infer_tp * layout.infer_ep)
    lines: Lines = [("infer_tensor_parallel_size", layout.infer_tp, f"{layout.infer_dp} replicas")]
    if shape.moe:
        experts = shape.num_experts // (layout.infer_tp * layout.infer_ep)
        why = f"{experts} experts a die, {groups} vLLM groups"
        lines.append(("infer_expert_parallel_size", layout.infer_ep, why))
    at_once = memory.answers_at_once
    cache = f"KV cache of {memory.kv_cache / GB:.1f} GB: {at_once} whole answers at once"
    evaluated = -(-EVALUATED // layout.infer_dp)
    sequences = f"{memory.answers_needed} in a rollout, {evaluated} in an evaluation"
    lines += [
        ("enforce_eager", eager, "decode graphs would keep too much on the die"),
        ("offload_train_optimizer", eager, "to the host while vLLM runs: no GB to spare"),
        ("offload_train_grad", eager, ""),
        ("offload_train_param", eager, ""),
        ("gpu_memory_utilization", settings.gpu_memory_utilization, cache),
        ("max_num_seqs", settings.max_num_seqs, sequences),
    ]
    if batch.max_num_batched_tokens > 8192:
        lines.append(("max_num_batched_tokens", batch.max_num_batched_tokens, "a whole answer"))
    return [*lines, ("sampling_config.max_tokens", wanted.answer, "")]


def model_text(shape: ModelShape, part: str, title: str, path: str, answer: int) -> str:
    """The text of a model's part: what Megatron is told of it, its files, and lengths of 512 tokens
    of a prompt and `answer` of an answer.
    """
    rows = -(-shape.vocab_size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE
    sizes = {"max_position_embeddings": shape.max_position_embeddings, "padded_vocab_size": rows}
    arguments = family_of(shape).megatron_arguments(shape) | sizes | SAME
    if shape.moe:
        arguments |= EXPERTS
    text = f"# @package _global_\n# {title}, of its config.json, by tools/plan_layout.py.\nmodel:\n"
    text += f"  {part}:\n"
    for key, value in arguments.items():
        if value is not None and value is not False and not key.endswith("_dropout"):
            text += f"    {key}: {_yaml(value)}\n"
    data = f"${{oc.env:DATA,data}}/gsm8k/{Path(path).name}/gsm8k_train"
    training: Lines = [
        ("model", part, ""),
        ("tokenizer_name_or_path", path, ""),
        ("data_path", data, ""),
        ("seq_length", PROMPT + answer, "prompt and answer"),
    ]
    ranks = LOAD
    rollout: Lines = [("sampling_config.max_tokens", answer, "")]
    actor: Lines = [("model", part, "")]
    if shape.moe:
        ranks += "-ep${actor_config.expert_model_parallel_size}"
        training += [
            ("recompute_granularity", "full", "each layer is computed again for its gradient"),
            (
                "recompute_method",
                "block",
                "uniform: no gradient with LoRA (MindSpeed-LLM training/training.py:168)",
            ),
            ("recompute_num_layers", shape.num_hidden_layers, ""),
        ]
        actor.append(("moe_tp_extend_ep", True, "the weight sync knows experts in no other form"))
        rollout.insert(0, ("enable_expert_parallel", True, ""))
    actor.append(("load", ranks, ""))
    sections = {"megatron_training": training, "actor_config": actor, "generate_config": rollout}
    return text + "".join(map(_section, sections.items()))
