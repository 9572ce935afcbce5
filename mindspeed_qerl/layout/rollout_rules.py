"""Rollout: vLLM's ranks, the weight sync, lengths."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rule import (
    CONTAINER,
    PARALLEL_STATE,
    VALIDATION,
    Rule,
    indivisible,
    multiple,
    multiple_widths,
)


def _infer_groups_hold_whole_training_groups(plan: Plan) -> str | None:
    layout = plan.layout
    training, infer = layout.ep, layout.infer_tp * layout.infer_ep
    if layout.tp_extend_ep:
        training *= layout.tp
    if infer % training == 0:
        return None
    return (
        f"infer TP {layout.infer_tp} x EP {layout.infer_ep} = {infer} is no multiple of "
        f"training's TP {layout.tp} x EP {layout.ep} = {training}"
    )


def _stages_hold_whole_infer_tp_groups(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.tp >= layout.infer_tp:
        return None
    ranks, by = layout.world // layout.pp, f"infer TP {layout.infer_tp}"
    return indivisible(
        f"ranks a stage ({layout.world} / PP {layout.pp})", ranks, by, layout.infer_tp
    )


ROLLOUT = (
    Rule(
        # vLLM has no pipeline parallelism.
        "no_infer_pipeline",
        f"{VALIDATION}:169",
        lambda plan: plan.layout.infer_pp > 1 and f"infer PP {plan.layout.infer_pp} must be 1",
    ),
    Rule(
        # The ranks are a multiple of infer TP x EP; a rank left over would be in no expert group.
        "ranks_fill_infer_groups",
        f"{PARALLEL_STATE}:267",
        multiple("ranks", "layout.world", "layout.infer_tp", "layout.infer_ep"),
    ),
    Rule(
        # Infer TP x EP is a multiple of training's TP x EP: the sync cuts a training rank's experts
        # into shares, and never joins two ranks'.
        "infer_groups_hold_whole_training_groups",
        f"{CONTAINER}:156",
        _infer_groups_hold_whole_training_groups,
    ),
    Rule(
        # Of training's TP and infer TP, one is a multiple of the other.
        "tensor_parallel_sizes_divide",
        f"{CONTAINER}:651",
        lambda plan: (
            plan.layout.tp % plan.layout.infer_tp
            and plan.layout.infer_tp % plan.layout.tp
            and f"TP {plan.layout.tp} and infer TP {plan.layout.infer_tp}: neither is a "
            "multiple of the other"
        ),
    ),
    Rule(
        # With infer TP above training's, a pipeline stage's ranks are a multiple of infer TP.
        "stages_hold_whole_infer_tp_groups",
        f"{CONTAINER}:174",
        _stages_hold_whole_infer_tp_groups,
    ),
    Rule(
        # Attention heads are a multiple of infer TP.
        "heads_by_infer_tp",
        "vllm vllm/config/model.py:1048",
        multiple("attention heads", "shape.num_attention_heads", "layout.infer_tp"),
    ),
    Rule(
        # KV heads are a multiple of infer TP: vLLM could repeat them, the sync cannot.
        "kv_heads_by_infer_tp",
        "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py:160",
        multiple("KV heads", "shape.num_key_value_heads", "layout.infer_tp"),
    ),
    Rule(
        # The width of a dense MLP or a shared expert is a multiple of infer TP.
        "width_by_infer_tp",
        "vllm vllm/model_executor/layers/linear.py:1250",
        multiple_widths("layout.infer_tp"),
    ),
    Rule(
        # The rows of vLLM's embedding are a multiple of infer TP.
        "vocabulary_by_infer_tp",
        "vllm vllm/model_executor/layers/vocab_parallel_embedding.py:263",
        multiple("rows of vLLM's embedding", "vllm_rows", "layout.infer_tp"),
    ),
    Rule(
        # Experts are a multiple of infer TP x EP.
        "experts_by_infer_ranks",
        f"{CONTAINER}:500",
        multiple("experts", "shape.num_experts", "layout.infer_tp", "layout.infer_ep"),
    ),
    Rule(
        # A mixture of experts needs infer TP x EP above 1: the first sync fails on a group of one.
        "infer_experts_are_spread",
        f"{CONTAINER}:569",
        lambda plan: (
            plan.shape.moe
            and plan.layout.infer_tp * plan.layout.infer_ep == 1
            and "infer TP 1 x EP 1 with a mixture of experts: the first weight sync fails; at "
            "least 2 ranks must share vLLM's experts"
        ),
    ),
    Rule(
        # A mixture of experts with infer TP x EP above 1 needs enable_expert_parallel: the sync
        # deals whole experts to vLLM's ranks.
        "infer_experts_are_whole",
        f"{CONTAINER}:140",
        lambda plan: (
            plan.shape.moe
            and plan.layout.infer_tp * plan.layout.infer_ep > 1
            and not plan.layout.enable_expert_parallel
            and "enable_expert_parallel must be true for a mixture of experts with infer TP "
            f"{plan.layout.infer_tp} x EP {plan.layout.infer_ep}: the sync deals whole experts to "
            "vLLM's ranks"
        ),
    ),
    Rule(
        # A model with a shared expert has infer TP 1: its columns would be computed on infer TP
        # ranks, and where tokens go to experts by MC2 or all-to-all (910C) nobody adds the ranks'
        # parts. vLLM answers on, wrongly.
        "shared_expert_is_summed",
        "vllm-ascend vllm_ascend/ops/register_custom_ops.py:231",
        lambda plan: (
            plan.layout.infer_tp > 1
            and plan.shape.shared_expert_intermediate_size
            and f"infer TP {plan.layout.infer_tp} with a shared expert: vllm-ascend leaves its "
            "parts unsummed on a 910C, and every answer is wrong; infer TP must be 1 (infer EP may "
            "be more)"
        ),
    ),
    Rule(
        # There are at least 2 NPUs: the groups that vLLM's ranks are found by are not made for one.
        "two_ranks",
        f"{PARALLEL_STATE}:80",
        lambda plan: (
            plan.layout.world == 1
            and "1 NPU: it takes at least 2, since the groups that vLLM's ranks are found by are "
            "not made for one"
        ),
    ),
    Rule(
        # seq_length is at most max_model_len.
        "answers_fit_vllm",
        f"{VALIDATION}:49",
        lambda plan: (
            plan.batch.seq_length > plan.batch.max_model_len
            and f"seq_length {plan.batch.seq_length} is above max_model_len "
            f"{plan.batch.max_model_len}"
        ),
    ),
    Rule(
        # max_num_batched_tokens is at least max_model_len: vLLM-Ascend's scheduler does not cut
        # prompts into chunks.
        "prompts_fit_the_scheduler",
        "vllm-ascend vllm_ascend/core/schedule_config.py:66",
        lambda plan: (
            plan.batch.max_num_batched_tokens < plan.batch.max_model_len
            and f"max_num_batched_tokens {plan.batch.max_num_batched_tokens} is below "
            f"max_model_len {plan.batch.max_model_len}"
        ),
    ),
)
