"""What upstream demands of a layout and a batch: rules, each with its line of upstream."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.recipe.types import Layout

# repository and path of what is cited most
VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
CONTAINER = "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py"
PARALLEL_STATE = "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py"
WORKER = "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py"
ENGINE = "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py"
TRANSFORMER = "Megatron-LM megatron/core/transformer/transformer_config.py"
CP_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo")


@dataclass(frozen=True)
class Rule:
    """What upstream demands of a plan: `check` gives one sentence with the numbers if a plan breaks
    it.
    """

    name: str
    source: str  # `repository path:line` of upstream; tests/upstream/rule_lines.json has that line
    statement: (
        str  # in words; and what would happen without it, where upstream does not state it itself
    )
    check: Callable[[Layout, Plan], str | bool | None]  # of a plan's layout and the plan


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks: its name, one sentence with the numbers, and `repository
    path:line` of upstream.
    """

    rule: str
    message: str
    source: str


def indivisible(what: str, number: int, by: str, *sizes: int) -> str | None:
    """The sentence for a number that is no multiple of the product of `sizes`; `by` names them.

    >>> indivisible("ranks", 10, "TP {} x PP {}", 2, 2)
    '10 ranks cannot be divided by TP 2 x PP 2 = 4'
    >>> indivisible("ranks", 12, "TP {} x PP {}", 2, 2)
    """
    divisor = by.format(*sizes) + (f" = {prod(sizes)}" if len(sizes) > 1 else "")
    return f"{number:,} {what} cannot be divided by {divisor}" if number % prod(sizes) else None


def indivisible_width(plan: Plan, by: str, size: int) -> str | None:
    """`indivisible` for a dense MLP and for a shared expert."""
    return indivisible("columns of the MLP", plan.shape.intermediate_size, by, size) or indivisible(
        "columns of the shared expert", plan.shape.shared_expert_intermediate_size, by, size
    )


# ---- training: ranks, pipeline stages, tensor and context parallelism, experts ----


def _layer_list_has_a_number_for_each_stage(it: Layout, plan: Plan) -> str | None:
    given, pp = it.num_layer_list, it.pp
    if given and (len(given) != pp or pp == 1):
        remedy = "; leave it out without pipeline" if pp == 1 else ""
        return f"num_layer_list {','.join(map(str, given))} has {len(given)} numbers for PP {pp}{remedy}"
    return None


def _layer_list_sums_to_the_layers(it: Layout, plan: Plan) -> str | None:
    given, layers = it.num_layer_list, plan.shape.num_hidden_layers
    if given and (sum(given) != layers or not all(given)):
        return (
            f"num_layer_list {','.join(map(str, given))} sums to {sum(given)}, the model has "
            f"{layers} layers; a stage has at least 1"
        )
    return None


def _virtual_stages(it: Layout, plan: Plan) -> str | None:
    layers = it.layers_per_virtual_stage
    if layers and (it.pp == 1 or it.num_layer_list):
        return (
            f"num_layers_per_virtual_pipeline_stage {layers} needs PP above 1 (it is {it.pp}) and "
            "no num_layer_list"
        )
    stage = plan.shape.num_hidden_layers // it.pp
    return (
        indivisible("layers a stage", stage, "{} layers a virtual stage", layers)
        if layers
        else None
    )


def _context_parallel_heads(it: Layout, plan: Plan) -> str | None:
    if it.cp == 1 or it.cp_algorithm != CP_ALGORITHMS[0]:
        return None
    return indivisible(
        "attention heads", plan.shape.num_attention_heads, "TP {} x CP {}", it.tp, it.cp
    )


TRAINING = (
    Rule(
        "ranks_fill_training_groups",
        f"{VALIDATION}:82",
        "The ranks are a multiple of TP x PP x CP.",
        lambda it, p: indivisible("ranks", it.world, "TP {} x PP {} x CP {}", it.tp, it.pp, it.cp),
    ),
    Rule(
        "ranks_fill_expert_groups",
        "Megatron-LM megatron/core/parallel_state.py:700",
        "The ranks are a multiple of TP x EP x PP.",
        lambda it, p: indivisible("ranks", it.world, "TP {} x EP {} x PP {}", it.tp, it.ep, it.pp),
    ),
    Rule(
        "ranks_fill_nodes",
        "MindSpeed-RL mindspeed_rl/workers/scheduler/launcher.py:241",
        "With more ranks than a node has, every node is full: upstream starts as many actors on "
        "each.",
        lambda it, p: indivisible("ranks", it.world, "{} ranks a node", it.node_width),
    ),
    Rule(
        "heads_by_tp",
        f"{TRANSFORMER}:559",
        "Attention heads are a multiple of TP.",
        lambda it, p: indivisible("attention heads", p.shape.num_attention_heads, "TP {}", it.tp),
    ),
    Rule(
        "kv_heads_by_tp",
        f"{TRANSFORMER}:574",
        "KV heads are a multiple of TP.",
        lambda it, p: indivisible("KV heads", p.shape.num_key_value_heads, "TP {}", it.tp),
    ),
    Rule(
        "width_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/layers.py:765",
        "The width of a dense MLP or a shared expert is a multiple of TP.",
        lambda it, p: indivisible_width(p, "TP {}", it.tp),
    ),
    Rule(
        "vocabulary_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/utils.py:110",
        "The rows of the embedding are a multiple of TP.",
        lambda it, p: indivisible("rows of the embedding", p.rows, "TP {}", it.tp),
    ),
    Rule(
        "vocabulary_is_vllms",
        "MindSpeed-RL mindspeed_rl/workers/resharding/memory_buffer.py:59",
        "Megatron's embedding has the rows of vLLM's: the model's vocabulary, padded to a "
        "multiple of 64.",
        lambda it, p: (
            p.rows != p.vllm_rows
            and f"padded_vocab_size {p.rows:,} must be {p.vllm_rows:,}, the rows of vLLM's "
            f"embedding for a vocabulary of {p.shape.vocab_size:,}"
        ),
    ),
    Rule(
        "layers_by_pp",
        f"{CONTAINER}:274",
        "Layers are a multiple of PP, or num_layer_list says how many each stage has.",
        lambda it, p: (
            not it.num_layer_list
            and indivisible(
                "layers", p.shape.num_hidden_layers, "PP {} (or give num_layer_list)", it.pp
            )
        ),
    ),
    Rule(
        "layer_list_has_a_number_for_each_stage",
        "MindSpeed-LLM mindspeed_llm/features_manager/pipeline_parallel/num_layer_list.py:27",
        "num_layer_list has PP numbers, and PP is above 1.",
        _layer_list_has_a_number_for_each_stage,
    ),
    Rule(
        "layer_list_sums_to_the_layers",
        "MindSpeed-LLM mindspeed_llm/training/arguments.py:1159",
        "num_layer_list sums to the model's layers, and no stage is empty.",
        _layer_list_sums_to_the_layers,
    ),
    Rule(
        "virtual_stages",
        "Megatron-LM megatron/training/arguments.py:461",
        "A virtual pipeline needs PP above 1, no "
        "num_layer_list, and stages that are a multiple of its layers.",
        _virtual_stages,
    ),
    Rule(
        "virtual_stages_are_several",
        "MindSpeed mindspeed/features_manager/megatron_basic/megatron_basic.py:22",
        "A virtual pipeline has more than one virtual stage a stage.",
        lambda it, p: (
            it.layers_per_virtual_stage
            and it.layers_per_virtual_stage * it.pp == p.shape.num_hidden_layers
            and f"num_layers_per_virtual_pipeline_stage {it.layers_per_virtual_stage} x PP {it.pp} "
            f"are all {p.shape.num_hidden_layers} layers, one virtual stage a stage: leave it "
            "out"
        ),
    ),
    Rule(
        "shared_backbone_has_one_chunk",
        "MindSpeed-RL mindspeed_rl/workers/integrated_worker.py:171",
        "A reference on the shared backbone goes with no virtual pipeline: only the first "
        "chunk's adapters are switched off for it.",
        lambda it, p: (
            p.share_backbone
            and it.layers_per_virtual_stage is not None
            and "share_backbone with num_layers_per_virtual_pipeline_stage "
            f"{it.layers_per_virtual_stage}: only the first chunk's adapters would be off for "
            "the reference"
        ),
    ),
    Rule(
        "shared_backbone_has_adapters",
        f"{VALIDATION}:288",
        "A reference on the shared backbone needs LoRA: it is the model without its adapters.",
        lambda it, p: (
            p.share_backbone
            and not p.lora
            and "share_backbone needs LoRA: the reference is the model without its adapters"
        ),
    ),
    Rule(
        "context_parallel_heads",
        "MindSpeed mindspeed/features_manager/context_parallel/ulysses_context_parallel.py:32",
        "With Ulysses context parallelism, heads are a multiple of TP x CP.",
        _context_parallel_heads,
    ),
    Rule(
        "context_parallel_chunks",
        "Megatron-LM megatron/training/arguments.py:684",
        "With context parallelism of either kind, seq_length is a multiple of 2 x CP.",
        lambda it, p: (
            it.cp > 1
            and indivisible("tokens of seq_length", p.batch.seq_length, "{} x CP {}", 2, it.cp)
        ),
    ),
    Rule(
        "context_parallel_algorithm",
        f"{VALIDATION}:56",
        "Context parallelism is ulysses_cp_algo or megatron_cp_algo.",
        lambda it, p: (
            it.cp > 1
            and it.cp_algorithm not in CP_ALGORITHMS
            and f"CP {it.cp} with {it.cp_algorithm}: upstream has {' and '.join(CP_ALGORITHMS)}"
        ),
    ),
    Rule(
        "dense_model_without_ep",
        f"{TRANSFORMER}:621",
        "A dense model has EP 1.",
        lambda it, p: (
            it.ep > 1
            and not p.shape.moe
            and f"EP {it.ep} with a dense model: there are no experts to "
            "divide: set actor_config.expert_model_parallel_size=1"
        ),
    ),
    Rule(
        "experts_by_training_ranks",
        "MindSpeed mindspeed/features_manager/moe/tp_extend_ep.py:22",
        "Experts are a multiple of TP x EP: with moe_tp_extend_ep the TP ranks hold whole "
        "experts too.",
        lambda it, p: indivisible("experts", p.shape.num_experts, "TP {} x EP {}", it.tp, it.ep),
    ),
    Rule(
        "experts_are_whole",
        f"{CONTAINER}:189",
        "A mixture of experts needs moe_tp_extend_ep: the weight sync knows "
        "experts in no other form, and vLLM's would stay zero.",
        lambda it, p: (
            p.shape.moe
            and not it.tp_extend_ep
            and "moe_tp_extend_ep = False must be True for a mixture of experts: without it "
            "vLLM's experts stay zero, or the first sync fails"
        ),
    ),
    Rule(
        "experts_need_sequence_parallelism",
        "Megatron-LM megatron/core/transformer/moe/moe_layer.py:133",
        "A mixture of experts with TP above 1 needs sequence_parallel.",
        lambda it, p: (
            p.shape.moe
            and it.tp > 1
            and not it.sequence_parallel
            and "sequence_parallel must be true for a mixture of experts with "
            f"tensor_model_parallel_size = {it.tp}"
        ),
    ),
    Rule(
        "dispatcher_has_ranks",
        "MindSpeed mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py:154",
        "A mixture of experts without LoRA needs TP x EP above 1: the TP-to-EP dispatcher "
        "returns a variable that it sets only there. With LoRA MindSpeed-LLM builds the other "
        "dispatcher.",
        lambda it, p: (
            p.shape.moe
            and not p.lora
            and it.tp_extend_ep
            and it.tp * it.ep == 1
            and "TP 1 x EP 1 without LoRA: MindSpeed's TP-to-EP dispatcher needs at least 2 ranks"
        ),
    ),
)


# ---- rollout: vLLM's ranks, the weight sync, lengths ----


def _infer_groups_hold_whole_training_groups(it: Layout, plan: Plan) -> str | None:
    training, infer = it.tp * it.ep if it.tp_extend_ep else it.ep, it.infer_tp * it.infer_ep
    if infer % training:
        return (
            f"infer TP {it.infer_tp} x EP {it.infer_ep} = {infer} is no multiple of training's TP "
            f"{it.tp} x EP {it.ep} = {training}"
        )
    return None


def _stages_hold_whole_infer_tp_groups(it: Layout, plan: Plan) -> str | None:
    return (
        None
        if it.tp >= it.infer_tp
        else indivisible(
            f"ranks a stage ({it.world} / PP {it.pp})",
            it.world // it.pp,
            "infer TP {}",
            it.infer_tp,
        )
    )


ROLLOUT = (
    Rule(
        "no_infer_pipeline",
        f"{VALIDATION}:169",
        "vLLM has no pipeline parallelism.",
        lambda it, p: it.infer_pp > 1 and f"infer PP {it.infer_pp} must be 1",
    ),
    Rule(
        "ranks_fill_infer_groups",
        f"{PARALLEL_STATE}:267",
        "The ranks are a multiple of infer TP x EP; a rank left over would be in no expert group.",
        lambda it, p: indivisible(
            "ranks", it.world, "infer TP {} x EP {}", it.infer_tp, it.infer_ep
        ),
    ),
    Rule(
        "infer_groups_hold_whole_training_groups",
        f"{CONTAINER}:156",
        "Infer TP x EP is a multiple of training's TP x EP: the sync cuts a training rank's "
        "experts into shares, and never joins two ranks'.",
        _infer_groups_hold_whole_training_groups,
    ),
    Rule(
        "tensor_parallel_sizes_divide",
        f"{CONTAINER}:651",
        "Of training's TP and infer TP, one is a multiple of the other.",
        lambda it, p: (
            it.tp % it.infer_tp
            and it.infer_tp % it.tp
            and f"TP {it.tp} and infer TP {it.infer_tp}: neither is a multiple of the other"
        ),
    ),
    Rule(
        "stages_hold_whole_infer_tp_groups",
        f"{CONTAINER}:174",
        "With infer TP above training's, a pipeline stage's ranks are a multiple of infer TP.",
        _stages_hold_whole_infer_tp_groups,
    ),
    Rule(
        "heads_by_infer_tp",
        "vllm vllm/config/model.py:1048",
        "Attention heads are a multiple of infer TP.",
        lambda it, p: indivisible(
            "attention heads", p.shape.num_attention_heads, "infer TP {}", it.infer_tp
        ),
    ),
    Rule(
        "kv_heads_by_infer_tp",
        "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py:160",
        "KV heads are a multiple of infer TP: vLLM could repeat them, the sync cannot.",
        lambda it, p: indivisible(
            "KV heads", p.shape.num_key_value_heads, "infer TP {}", it.infer_tp
        ),
    ),
    Rule(
        "width_by_infer_tp",
        "vllm vllm/model_executor/layers/linear.py:1250",
        "The width of a dense MLP or a shared expert is a multiple of infer TP.",
        lambda it, p: indivisible_width(p, "infer TP {}", it.infer_tp),
    ),
    Rule(
        "vocabulary_by_infer_tp",
        "vllm vllm/model_executor/layers/vocab_parallel_embedding.py:263",
        "The rows of vLLM's embedding are a multiple of infer TP.",
        lambda it, p: indivisible(
            "rows of vLLM's embedding", p.vllm_rows, "infer TP {}", it.infer_tp
        ),
    ),
    Rule(
        "experts_by_infer_ranks",
        f"{CONTAINER}:500",
        "Experts are a multiple of infer TP x EP.",
        lambda it, p: indivisible(
            "experts", p.shape.num_experts, "infer TP {} x EP {}", it.infer_tp, it.infer_ep
        ),
    ),
    Rule(
        "infer_experts_are_spread",
        f"{CONTAINER}:569",
        "A mixture of experts needs infer TP x EP above 1: the first sync fails on a group of one.",
        lambda it, p: (
            p.shape.moe
            and it.infer_tp * it.infer_ep == 1
            and "infer TP 1 x EP 1 with a mixture of experts: the first weight sync fails; at "
            "least 2 ranks must share vLLM's experts"
        ),
    ),
    Rule(
        "infer_experts_are_whole",
        f"{CONTAINER}:140",
        "A mixture of experts with infer TP x EP above 1 needs "
        "enable_expert_parallel: the sync deals whole experts to vLLM's ranks.",
        lambda it, p: (
            p.shape.moe
            and it.infer_tp * it.infer_ep > 1
            and not it.enable_expert_parallel
            and "enable_expert_parallel must be true for a mixture of experts with infer TP "
            f"{it.infer_tp} x EP {it.infer_ep}: the sync deals whole experts to vLLM's ranks"
        ),
    ),
    Rule(
        "shared_expert_is_summed",
        "vllm-ascend vllm_ascend/ops/register_custom_ops.py:231",
        "A model with a shared expert has infer TP 1: its columns would be computed on infer TP "
        "ranks, and where tokens go to experts by MC2 or all-to-all (910C) nobody adds the "
        "ranks' parts. vLLM answers on, wrongly.",
        lambda it, p: (
            it.infer_tp > 1
            and p.shape.shared_expert_intermediate_size
            and f"infer TP {it.infer_tp} with a shared expert: vllm-ascend leaves its parts "
            "unsummed on a 910C, and every answer is wrong; infer TP must be 1 (infer EP may "
            "be more)"
        ),
    ),
    Rule(
        "two_ranks",
        f"{PARALLEL_STATE}:80",
        "There are at least 2 NPUs: the groups that vLLM's ranks are found by are not made for "
        "one.",
        lambda it, p: (
            it.world == 1
            and "1 NPU: it takes at least 2, since the groups that vLLM's ranks are found by are "
            "not made for one"
        ),
    ),
    Rule(
        "answers_fit_vllm",
        f"{VALIDATION}:49",
        "seq_length is at most max_model_len.",
        lambda it, p: (
            p.batch.seq_length > p.batch.max_model_len
            and f"seq_length {p.batch.seq_length} is above max_model_len {p.batch.max_model_len}"
        ),
    ),
    Rule(
        "prompts_fit_the_scheduler",
        "vllm-ascend vllm_ascend/core/schedule_config.py:66",
        "max_num_batched_tokens is at least max_model_len: vLLM-Ascend's scheduler does not cut "
        "prompts into chunks.",
        lambda it, p: (
            p.batch.max_num_batched_tokens < p.batch.max_model_len
            and f"max_num_batched_tokens {p.batch.max_num_batched_tokens} is below max_model_len "
            f"{p.batch.max_model_len}"
        ),
    ),
)


# ---- batch: prompts and answers of an iteration, mini-batches, dispatch sizes, padding ----


def _batch_by(plan: Plan, by: str, ranks: int) -> str | None:
    return indivisible(
        "prompts of global_batch_size", plan.batch.global_batch_size, by, max(ranks, 1)
    )


def _dispatch_divides_the_answers(it: Layout, plan: Plan) -> str | None:
    wrong = [
        f"{key} {size}"
        for key, size in plan.batch.dispatch.items()
        if size and plan.batch.answers % size
    ]
    return (
        f"{plan.batch.answers} answers of an iteration cannot be divided by {' or '.join(wrong)}"
        if wrong
        else None
    )


def _dispatch_is_at_most_a_share(it: Layout, plan: Plan) -> str:
    dp, wrong = it.dp, []
    ranks_of = {"actor_rollout": it.infer_dp, "actor_logprob": dp, "ref": dp, "actor_update": dp}
    for name, ranks in ranks_of.items():
        size, share = (
            plan.batch.dispatch.get(f"{name}_dispatch_size"),
            plan.batch.answers // max(ranks, 1),
        )
        if size and size > share:
            wrong.append(
                f"{name}_dispatch_size {size} is above the {share} answers of each of {ranks} ranks"
            )
    return "; ".join(wrong)


def _rollout_share_by_dispatch(it: Layout, plan: Plan) -> str | None:
    size = plan.batch.dispatch.get("actor_rollout_dispatch_size")
    share = plan.batch.global_batch_size // max(it.infer_dp, 1) * plan.batch.samples_per_prompt
    return (
        indivisible("answers of a vLLM replica", share, "actor_rollout_dispatch_size {}", size)
        if size
        else None
    )


def _whole_prompts_are_dispatched(it: Layout, plan: Plan) -> str | None:
    answers = plan.batch.samples_per_prompt
    wrong = [
        f"{key} {size}"
        for key in ("actor_rollout_dispatch_size", "reward_dispatch_size")
        if (size := plan.batch.dispatch.get(key)) and size % answers
    ]
    return (
        f"{' and '.join(wrong)}: not a multiple of the {answers} answers of a prompt"
        if wrong
        else None
    )


def _update_takes_a_mini_batch(it: Layout, plan: Plan) -> str | None:
    size, mini = (
        plan.batch.dispatch.get("actor_update_dispatch_size"),
        plan.batch.mini_answers / plan.dp,
    )
    if size and size < mini:
        return f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's mini-batch"
    return None


def _update_takes_every_answer(it: Layout, plan: Plan) -> str | None:
    size, share = plan.batch.dispatch.get("actor_update_dispatch_size"), plan.share
    if not size or size >= share:
        return None
    if plan.batch.guarantee_order:
        return (
            f"actor_update_dispatch_size {size} with guarantee_order: only {size} of the {share} "
            "answers of each rank would be trained on"
        )
    return indivisible("answers of a training rank", share, "actor_update_dispatch_size {}", size)


BATCH = (
    Rule(
        "batch_by_training_dp",
        f"{VALIDATION}:134",
        "global_batch_size is a multiple of training's data-parallel size.",
        lambda it, p: _batch_by(
            p, f"training DP {{}} = {it.world} / (TP {it.tp} x PP {it.pp} x CP {it.cp})", it.dp
        ),
    ),
    Rule(
        "batch_by_infer_dp",
        f"{VALIDATION}:158",
        "global_batch_size is a multiple of vLLM's replicas, world / infer TP.",
        lambda it, p: _batch_by(
            p, f"vLLM's {{}} replicas = {it.world} / infer TP {it.infer_tp}", it.infer_dp
        ),
    ),
    Rule(
        "batch_by_nodes",
        f"{VALIDATION}:281",
        "global_batch_size is a multiple of the nodes: each has one process that scores answers.",
        lambda it, p: _batch_by(p, "{} nodes", it.nodes),
    ),
    Rule(
        "share_by_micro_batch",
        f"{VALIDATION}:139",
        "A training rank's answers of an iteration are a multiple of micro_batch_size.",
        lambda it, p: indivisible(
            "answers of a training rank",
            p.batch.global_batch_size // p.dp * p.batch.samples_per_prompt,
            "micro_batch_size {}",
            p.batch.micro_batch_size,
        ),
    ),
    Rule(
        "mini_batch_by_training_dp",
        f"{WORKER}:166",
        "mini_batch_size x n_samples_per_prompt is a multiple of training's data-parallel size: "
        "upstream rounds down, and the answers that are left make an update of their own.",
        lambda it, p: indivisible(
            "answers of a mini-batch", p.batch.mini_answers, "training DP {}", p.dp
        ),
    ),
    Rule(
        "mini_batches_are_equal",
        f"{ENGINE}:515",
        "A training rank's answers of an iteration are a multiple of its "
        "mini-batch: those left over would make a small update of their own.",
        lambda it, p: (
            not p.batch.mini_answers % p.dp
            and p.mini_share < p.share  # else one update
            and indivisible(
                "answers of a training rank", p.share, "the {} of its mini-batch", p.mini_share
            )
        ),
    ),
    Rule(
        "mini_batch_by_micro_batch",
        f"{ENGINE}:210",
        "A training rank's mini-batch is a multiple of "
        "micro_batch_size: a smaller last micro-batch would weigh as much as a full one.",
        lambda it, p: (
            p.mini_share < p.share  # else one update: share_by_micro_batch
            and indivisible(
                "answers of a rank's mini-batch",
                p.mini_share,
                "micro_batch_size {}",
                p.batch.micro_batch_size,
            )
        ),
    ),
    Rule(
        "dispatch_divides_the_answers",
        f"{VALIDATION}:312",
        "Every dispatch size divides the answers of an iteration.",
        _dispatch_divides_the_answers,
    ),
    Rule(
        "dispatch_is_at_most_a_share",
        f"{VALIDATION}:377",
        "A dispatch size is at most a rank's share of the answers: of vLLM's replicas for the "
        "rollout, of training's ranks for the others.",
        _dispatch_is_at_most_a_share,
    ),
    Rule(
        "rollout_share_by_dispatch",
        f"{VALIDATION}:192",
        "A vLLM replica's answers are a multiple of actor_rollout_dispatch_size.",
        _rollout_share_by_dispatch,
    ),
    Rule(
        "whole_prompts_are_dispatched",
        "MindSpeed-RL mindspeed_rl/trainer/utils/transfer_dock.py:436",
        "actor_rollout_dispatch_size and reward_dispatch_size are multiples of "
        "n_samples_per_prompt: these two take whole prompts.",
        _whole_prompts_are_dispatched,
    ),
    Rule(
        "update_takes_a_mini_batch",
        f"{VALIDATION}:367",
        "actor_update_dispatch_size is at least a training rank's mini-batch.",
        _update_takes_a_mini_batch,
    ),
    Rule(
        "update_takes_every_answer",
        f"{WORKER}:306",
        "actor_update_dispatch_size is a training rank's whole share with guarantee_order, where "
        "each rank is dealt that many answers once and the others are never trained on; without "
        "it, it divides the share, or ranks would differ in their number of updates and wait for "
        "ever.",
        _update_takes_every_answer,
    ),
    Rule(
        "removed_padding_resets_the_mask",
        f"{VALIDATION}:70",
        "use_remove_padding needs reset_attention_mask.",
        lambda it, p: (
            p.batch.use_remove_padding
            and not p.batch.reset_attention_mask
            and "use_remove_padding needs megatron_training.reset_attention_mask: true"
        ),
    ),
    Rule(
        "removed_padding_varies_in_a_pipeline",
        f"{VALIDATION}:64",
        "use_remove_padding with PP above 1 needs no_pad_to_seq_lengths.",
        lambda it, p: (
            p.batch.use_remove_padding
            and it.pp > 1
            and not p.batch.no_pad_to_seq_lengths
            and f"use_remove_padding with PP {it.pp} needs "
            "megatron_training.no_pad_to_seq_lengths: true"
        ),
    ),
)
RULES = TRAINING + ROLLOUT + BATCH


def broken(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Violation]:
    """Every rule of `rules` that the plan breaks; [] for a plan that upstream would run."""
    return [
        Violation(rule.name, message, rule.source)
        for rule in rules
        if (message := rule.check(plan.layout, plan))
    ]


def layout_faults(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Fault]:
    """`broken` as faults of a config."""
    return [
        Fault("layout", f"{violation.message} ({violation.rule}: {violation.source})")
        for violation in broken(plan, rules)
    ]
