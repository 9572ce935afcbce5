"""What upstream demands of a layout, a rule a row; and which rules a plan breaks."""

from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_qerl.common.errors import Fault

from .batch_rules import BATCH
from .plan import Plan
from .rule import Broken, Rule, indivisible, multiple, width_by

# ---- training ----


def layer_list_sums_to_the_layers(plan: Plan) -> Broken:
    given = plan.layout.num_layer_list
    layers = plan.shape.num_hidden_layers
    is_wrong = given != () and (sum(given) != layers or not all(given))
    return is_wrong and (
        f"num_layer_list {','.join(map(str, given))} sums to {sum(given)}, the model has {layers} layers; a "
        "stage has at least 1"
    )


def layer_list_has_a_number_for_each_stage(plan: Plan) -> Broken:
    given = plan.layout.num_layer_list
    pp = plan.layout.pp
    is_wrong = given != () and (len(given) != pp or pp == 1)
    return is_wrong and (
        f"num_layer_list {','.join(map(str, given))} has {len(given)} numbers for PP {pp}"
    )


TRAINING = [
    Rule(
        "ranks_fill_training_groups",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:82",
        multiple("ranks", "layout.world", "layout.tp", "layout.pp"),
    ),
    Rule(
        "ranks_fill_expert_groups",
        "Megatron-LM megatron/core/parallel_state.py:700",
        multiple("ranks", "layout.world", "layout.tp", "layout.ep", "layout.pp"),
    ),
    Rule(  # with more ranks than a node has upstream starts as many actors on each
        "ranks_fill_nodes",
        "MindSpeed-RL mindspeed_rl/workers/scheduler/launcher.py:241",
        multiple("ranks", "layout.world", "layout.node_width"),
    ),
    Rule(
        "heads_by_tp",
        "Megatron-LM megatron/core/transformer/transformer_config.py:559",
        multiple("attention heads", "shape.num_attention_heads", "layout.tp"),
    ),
    Rule(
        "kv_heads_by_tp",
        "Megatron-LM megatron/core/transformer/transformer_config.py:574",
        multiple("KV heads", "shape.num_key_value_heads", "layout.tp"),
    ),
    Rule(
        "width_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/layers.py:765",
        width_by("layout.tp"),
    ),
    Rule(
        "vocabulary_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/utils.py:110",
        multiple("rows of the embedding", "rows", "layout.tp"),
    ),
    Rule(  # the model's vocabulary, padded to a multiple of 64
        "vocabulary_is_vllms",
        "MindSpeed-RL mindspeed_rl/workers/resharding/memory_buffer.py:59",
        lambda plan: (
            plan.rows != plan.vllm_rows
            and f"padded_vocab_size {plan.rows:,} must be {plan.vllm_rows:,}, the rows of vLLM's "
            f"embedding for a vocabulary of {plan.shape.vocab_size:,}"
        ),
    ),
    Rule(
        "layers_by_pp",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:274",
        lambda plan: (
            not plan.layout.num_layer_list
            and plan.shape.num_hidden_layers % plan.layout.pp > 0
            and f"{plan.shape.num_hidden_layers} layers cannot be divided by PP {plan.layout.pp} (or "
            "give num_layer_list)"
        ),
    ),
    Rule(
        "layer_list_has_a_number_for_each_stage",
        "MindSpeed-LLM mindspeed_llm/features_manager/pipeline_parallel/num_layer_list.py:27",
        layer_list_has_a_number_for_each_stage,
    ),
    Rule(
        "layer_list_sums_to_the_layers",
        "MindSpeed-LLM mindspeed_llm/training/arguments.py:1159",
        layer_list_sums_to_the_layers,
    ),
    Rule(
        "shared_backbone_has_adapters",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:288",
        lambda plan: (
            plan.share_backbone
            and not plan.lora
            and "share_backbone needs LoRA: the reference is the model without its adapters"
        ),
    ),
    Rule(
        "dense_model_without_ep",
        "Megatron-LM megatron/core/transformer/transformer_config.py:621",
        lambda plan: (
            plan.layout.ep > 1
            and not plan.shape.moe
            and f"EP {plan.layout.ep} with a dense model: there are no experts to divide: set "
            "actor_config.expert_model_parallel_size=1"
        ),
    ),
    Rule(  # with moe_tp_extend_ep the TP ranks hold whole experts, too
        "experts_by_training_ranks",
        "MindSpeed mindspeed/features_manager/moe/tp_extend_ep.py:22",
        multiple("experts", "shape.num_experts", "layout.tp", "layout.ep"),
    ),
    Rule(
        "experts_need_sequence_parallelism",
        "Megatron-LM megatron/core/transformer/moe/moe_layer.py:133",
        lambda plan: (
            plan.shape.moe
            and plan.layout.tp > 1
            and not plan.layout.sequence_parallel
            and "sequence_parallel must be true for a mixture of experts with "
            f"tensor_model_parallel_size = {plan.layout.tp}"
        ),
    ),
    Rule(  # which returns a variable that it sets only there; with LoRA there is another one
        "dispatcher_has_ranks",
        "MindSpeed mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py:154",
        lambda plan: (
            plan.shape.moe
            and not plan.lora
            and plan.layout.expert_ranks == 1
            and "TP 1 x EP 1 without LoRA: MindSpeed's TP-to-EP dispatcher needs at least 2 ranks"
        ),
    ),
]

# ---- rollout ----


def infer_groups_hold_whole_training_groups(plan: Plan) -> Broken:
    """The sync cuts the experts of a training rank into shares, and never joins those of two."""
    layout = plan.layout
    training = layout.expert_ranks
    infer = layout.infer_expert_ranks
    return (
        plan.shape.moe
        and infer % training > 0
        and (
            f"infer TP {layout.infer_tp} x EP {layout.infer_ep} = {infer} is no multiple of "
            f"training's TP {layout.tp} x EP {layout.ep} = {training}"
        )
    )


def stages_hold_whole_infer_tp_groups(plan: Plan) -> Broken:
    layout = plan.layout
    return layout.tp < layout.infer_tp and indivisible(
        f"ranks a stage ({layout.world} / PP {layout.pp})",
        layout.world // layout.pp,
        f"infer TP {layout.infer_tp}",
        layout.infer_tp,
    )


ROLLOUT = [
    Rule(  # a rank left over would be in no expert group
        "ranks_fill_infer_groups",
        "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py:267",
        multiple("ranks", "layout.world", "layout.infer_tp", "layout.infer_ep"),
    ),
    Rule(
        "infer_groups_hold_whole_training_groups",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:156",
        infer_groups_hold_whole_training_groups,
    ),
    Rule(
        "tensor_parallel_sizes_divide",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:651",
        lambda plan: (
            plan.layout.tp % plan.layout.infer_tp > 0
            and plan.layout.infer_tp % plan.layout.tp > 0
            and f"TP {plan.layout.tp} and infer TP {plan.layout.infer_tp}: neither is a multiple of "
            "the other"
        ),
    ),
    Rule(
        "stages_hold_whole_infer_tp_groups",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:174",
        stages_hold_whole_infer_tp_groups,
    ),
    Rule(
        "heads_by_infer_tp",
        "vllm vllm/config/model.py:1048",
        multiple("attention heads", "shape.num_attention_heads", "layout.infer_tp"),
    ),
    Rule(  # vLLM could repeat them, the sync cannot
        "kv_heads_by_infer_tp",
        "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py:160",
        multiple("KV heads", "shape.num_key_value_heads", "layout.infer_tp"),
    ),
    Rule(
        "width_by_infer_tp",
        "vllm vllm/model_executor/layers/linear.py:1250",
        width_by("layout.infer_tp"),
    ),
    Rule(
        "vocabulary_by_infer_tp",
        "vllm vllm/model_executor/layers/vocab_parallel_embedding.py:263",
        multiple("rows of vLLM's embedding", "vllm_rows", "layout.infer_tp"),
    ),
    Rule(
        "experts_by_infer_ranks",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:500",
        multiple("experts", "shape.num_experts", "layout.infer_tp", "layout.infer_ep"),
    ),
    Rule(
        "infer_experts_are_spread",
        "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:569",
        lambda plan: (
            plan.shape.moe
            and plan.layout.infer_expert_ranks == 1
            and "infer TP 1 x EP 1 with a mixture of experts: the first weight sync fails; at least 2 "
            "ranks must share vLLM's experts"
        ),
    ),
    Rule(  # where tokens go to experts by MC2 or all-to-all; vLLM answers on
        "shared_expert_is_summed",
        "vllm-ascend vllm_ascend/ops/register_custom_ops.py:231",
        lambda plan: (
            plan.layout.infer_tp > 1
            and plan.shape.shared_expert_intermediate_size > 0
            and f"infer TP {plan.layout.infer_tp} with a shared expert: vllm-ascend leaves its parts "
            "unsummed on a 910C, and every answer is wrong; infer TP must be 1 (infer EP may be more)"
        ),
    ),
    Rule(
        "two_ranks",
        "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py:80",
        lambda plan: (
            plan.layout.world == 1
            and "1 NPU: it takes at least 2, since the groups that vLLM's ranks are found by are not "
            "made for one"
        ),
    ),
    Rule(
        "answers_fit_vllm",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:49",
        lambda plan: (
            plan.batch.seq_length > plan.batch.max_model_len
            and f"seq_length {plan.batch.seq_length} is above max_model_len {plan.batch.max_model_len}"
        ),
    ),
    Rule(  # vllm-ascend's scheduler does not cut prompts into chunks
        "prompts_fit_the_scheduler",
        "vllm-ascend vllm_ascend/core/schedule_config.py:66",
        lambda plan: (
            plan.batch.max_model_len > plan.batch.max_num_batched_tokens
            and f"max_num_batched_tokens {plan.batch.max_num_batched_tokens} is below max_model_len "
            f"{plan.batch.max_model_len}"
        ),
    ),
]

RULES = TRAINING + ROLLOUT + BATCH


@dataclass(frozen=True)
class Violation:
    """A rule that a plan breaks, by name, with one sentence that has the numbers, and its source."""

    rule: str
    message: str
    source: str


def broken(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Violation]:
    """Every rule of `rules` that the plan breaks; [] for a plan that upstream would run."""
    return [
        Violation(rule.name, message, rule.source)
        for rule in rules
        if (message := rule.check(plan))
    ]


def layout_faults(plan: Plan, rules: Iterable[Rule] = RULES) -> list[Fault]:
    """`broken` as faults of a config."""
    return [
        Fault("layout", f"{violation.message} ({violation.rule}: {violation.source})")
        for violation in broken(plan, rules)
    ]
