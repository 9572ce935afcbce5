"""Rules of the rollout: vLLM's ranks, the weight sync, lengths."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules.rule import indivisible, rule, vllm_vocabulary

VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
PARALLEL_STATE = "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py"
CONTAINER = "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py"


@rule("vLLM has no pipeline parallelism.", VALIDATION, 169, "if generate_config.infer_pipeline_parallel_size > 1:")
def no_infer_pipeline(plan: Plan) -> str | None:
    return f"infer PP {plan.layout.infer_pp} must be 1" if plan.layout.infer_pp > 1 else None


@rule("The ranks are a multiple of infer TP x EP; a rank left over would be in no expert group.", PARALLEL_STATE, 267,
      "num_expert_groups: int = infer_data_parallel_size * context_parallel_size // expert_model_parallel_size")
def ranks_fill_infer_groups(plan: Plan) -> str | None:
    layout = plan.layout
    return indivisible("ranks", layout.world, "infer TP {} x EP {}", layout.infer_tp, layout.infer_ep)


@rule("Infer TP x EP is a multiple of training's TP x EP: the sync cuts a training rank's experts into shares, and "
      "never joins two ranks'.", CONTAINER, 156, "if self._infer_ep_size % self._ep_size != 0:")
def infer_groups_hold_whole_training_groups(plan: Plan) -> str | None:
    layout = plan.layout
    training = layout.tp * layout.ep if layout.tp_extend_ep else layout.ep
    infer = layout.infer_tp * layout.infer_ep
    if infer % training:
        return (f"infer TP {layout.infer_tp} x EP {layout.infer_ep} = {infer} is no multiple of training's "
                f"TP {layout.tp} x EP {layout.ep} = {training}")
    return None


@rule("Of training's TP and infer TP, one is a multiple of the other.", CONTAINER, 651,
      "if self._infer_tp_size % self._tp_size != 0:")
def tensor_parallel_sizes_divide(plan: Plan) -> str | None:
    tp, infer_tp = plan.layout.tp, plan.layout.infer_tp
    if max(tp, infer_tp) % min(tp, infer_tp):
        return f"TP {tp} and infer TP {infer_tp}: neither is a multiple of the other"
    return None


@rule("With infer TP above training's, a pipeline stage's ranks are a multiple of infer TP.", CONTAINER, 174,
      "(self._world_size // self._pp_size) % self._infer_tp_size != 0):")
def stages_hold_whole_infer_tp_groups(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.tp >= layout.infer_tp:
        return None
    ranks = f"ranks a stage ({layout.world} / PP {layout.pp})"
    return indivisible(ranks, layout.world // layout.pp, "infer TP {}", layout.infer_tp)


@rule("Attention heads are a multiple of infer TP.", "vllm vllm/config/model.py", 1048,
      "if total_num_attention_heads % tensor_parallel_size != 0:")
def heads_by_infer_tp(plan: Plan) -> str | None:
    return indivisible("attention heads", plan.shape.num_attention_heads, "infer TP {}", plan.layout.infer_tp)


@rule("KV heads are a multiple of infer TP: vLLM could repeat them, the sync cannot.",
      "MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py", 160,
      "ng = hf_config.num_key_value_heads // infer_tensor_parallel_size")
def kv_heads_by_infer_tp(plan: Plan) -> str | None:
    return indivisible("KV heads", plan.shape.num_key_value_heads, "infer TP {}", plan.layout.infer_tp)


@rule("The width of a dense MLP or a shared expert is a multiple of infer TP.",
      "vllm vllm/model_executor/layers/linear.py", 1250,
      "self.input_size_per_partition = divide(input_size, self.tp_size)")
def width_by_infer_tp(plan: Plan) -> str | None:
    shape, tp = plan.shape, plan.layout.infer_tp
    return (indivisible("columns of the MLP", shape.intermediate_size, "infer TP {}", tp)
            or indivisible("columns of the shared expert", shape.shared_expert_intermediate_size, "infer TP {}", tp))


@rule("The rows of vLLM's embedding are a multiple of infer TP.",
      "vllm vllm/model_executor/layers/vocab_parallel_embedding.py", 263,
      "self.num_embeddings_per_partition = divide(self.num_embeddings_padded,")
def vocabulary_by_infer_tp(plan: Plan) -> str | None:
    return indivisible("rows of vLLM's embedding", vllm_vocabulary(plan), "infer TP {}", plan.layout.infer_tp)


@rule("Experts are a multiple of infer TP x EP.", CONTAINER, 500,
      "expert_pernode = int(self.num_experts / self._infer_ep_size_raw / self._infer_tp_size)")
def experts_by_infer_ranks(plan: Plan) -> str | None:
    layout = plan.layout
    return indivisible("experts", plan.shape.num_experts, "infer TP {} x EP {}", layout.infer_tp, layout.infer_ep)


@rule("A mixture of experts needs infer TP x EP above 1: the first sync fails on a group of one.", CONTAINER, 569,
      "src = src_router[cur_rank % infer_tp_ep_size]")
def infer_experts_are_spread(plan: Plan) -> str | None:
    if plan.shape.moe and plan.layout.infer_tp * plan.layout.infer_ep == 1:
        return ("infer TP 1 x EP 1 with a mixture of experts: the first weight sync fails; at least 2 ranks must "
                "share vLLM's experts")
    return None


@rule("A mixture of experts with infer TP x EP above 1 needs enable_expert_parallel: the sync deals whole experts to "
      "vLLM's ranks.", CONTAINER, 140, "self._infer_ep_size = self._infer_ep_size * self._infer_tp_size")
def infer_experts_are_whole(plan: Plan) -> str | None:
    layout = plan.layout
    if plan.shape.moe and layout.infer_tp * layout.infer_ep > 1 and not layout.enable_expert_parallel:
        return (f"enable_expert_parallel must be true for a mixture of experts with infer TP {layout.infer_tp} x EP "
                f"{layout.infer_ep}: the sync deals whole experts to vLLM's ranks")
    return None


@rule("There are at least 2 NPUs: the groups that vLLM's ranks are found by are not made for one.", PARALLEL_STATE, 80,
      "if torch.distributed.get_world_size() > 1:")
def two_ranks(plan: Plan) -> str | None:
    if plan.layout.world == 1:
        return "1 NPU: it takes at least 2, since the groups that vLLM's ranks are found by are not made for one"
    return None


@rule("seq_length is at most max_model_len.", VALIDATION, 49,
      "if generate_config.max_model_len < actor_config.seq_length:")
def answers_fit_vllm(plan: Plan) -> str | None:
    batch = plan.batch
    if batch.seq_length > batch.max_model_len:
        return f"seq_length {batch.seq_length} is above max_model_len {batch.max_model_len}"
    return None


@rule("max_num_batched_tokens is at least max_model_len: vLLM-Ascend's scheduler does not cut prompts into chunks.",
      "vllm-ascend vllm_ascend/core/schedule_config.py", 66, "if (self.max_num_batched_tokens < self.max_model_len")
def prompts_fit_the_scheduler(plan: Plan) -> str | None:
    batch = plan.batch
    if batch.max_num_batched_tokens < batch.max_model_len:
        return f"max_num_batched_tokens {batch.max_num_batched_tokens} is below max_model_len {batch.max_model_len}"
    return None
