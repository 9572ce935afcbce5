"""Rules of training: ranks, pipeline stages, tensor and context parallelism, experts."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules.rule import indivisible, rule, vllm_vocabulary

VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
TRANSFORMER = "Megatron-LM megatron/core/transformer/transformer_config.py"
CONTAINER = "MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py"
ARGUMENTS = "MindSpeed-LLM mindspeed_llm/training/arguments.py"
CP_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo")


@rule("The ranks are a multiple of TP x PP x CP.", VALIDATION, 82, "if resource.num_npus % product != 0:")
def ranks_fill_training_groups(plan: Plan) -> str | None:
    layout = plan.layout
    return indivisible("ranks", layout.world, "TP {} x PP {} x CP {}", layout.tp, layout.pp, layout.cp)


@rule("The ranks are a multiple of TP x EP x PP.", "Megatron-LM megatron/core/parallel_state.py", 700,
      "if decoder_world_size % expert_tensor_model_pipeline_parallel_size != 0:")
def ranks_fill_expert_groups(plan: Plan) -> str | None:
    layout = plan.layout
    return indivisible("ranks", layout.world, "TP {} x EP {} x PP {}", layout.tp, layout.ep, layout.pp)


@rule("With more ranks than a node has, every node is full: upstream starts as many actors on each.",
      "MindSpeed-RL mindspeed_rl/workers/scheduler/launcher.py", 241,
      "for bundle_index in range(0, self.num_devices_per_node):")
def ranks_fill_nodes(plan: Plan) -> str | None:
    return indivisible("ranks", plan.layout.world, "{} ranks a node", plan.layout.node_width)


@rule("Attention heads are a multiple of TP.", TRANSFORMER, 559,
      "if self.num_attention_heads % self.tensor_model_parallel_size != 0:")
def heads_by_tp(plan: Plan) -> str | None:
    return indivisible("attention heads", plan.shape.num_attention_heads, "TP {}", plan.layout.tp)


@rule("KV heads are a multiple of TP.", TRANSFORMER, 574,
      "if self.num_query_groups % self.tensor_model_parallel_size != 0:")
def kv_heads_by_tp(plan: Plan) -> str | None:
    return indivisible("KV heads", plan.shape.num_key_value_heads, "TP {}", plan.layout.tp)


@rule("The width of a dense MLP or a shared expert is a multiple of TP.",
      "Megatron-LM megatron/core/tensor_parallel/layers.py", 765,
      "self.output_size_per_partition = divide(output_size, world_size)")
def width_by_tp(plan: Plan) -> str | None:
    shape, tp = plan.shape, plan.layout.tp
    return (indivisible("columns of the MLP", shape.intermediate_size, "TP {}", tp)
            or indivisible("columns of the shared expert", shape.shared_expert_intermediate_size, "TP {}", tp))


@rule("The rows of the embedding are a multiple of TP.", "Megatron-LM megatron/core/tensor_parallel/utils.py", 110,
      "per_partition_vocab_size = divide(global_vocab_size, world_size)")
def vocabulary_by_tp(plan: Plan) -> str | None:
    rows = plan.padded_vocab_size or vllm_vocabulary(plan)
    return indivisible("rows of the embedding", rows, "TP {}", plan.layout.tp)


@rule("Megatron's embedding has the rows of vLLM's: the model's vocabulary, padded to a multiple of 64.",
      "MindSpeed-RL mindspeed_rl/workers/resharding/memory_buffer.py", 59,
      "buffer_tensor = buffer_tensor.view(param.shape)")
def vocabulary_is_vllms(plan: Plan) -> str | None:
    rows, wanted = plan.padded_vocab_size, vllm_vocabulary(plan)
    if rows is not None and rows != wanted:
        return (f"padded_vocab_size {rows:,} must be {wanted:,}, the rows of vLLM's embedding for a vocabulary of "
                f"{plan.shape.vocab_size:,}")
    return None


@rule("Layers are a multiple of PP, or num_layer_list says how many each stage has.", CONTAINER, 274,
      "if self._num_hidden_layers % self._pp_size != 0:")
def layers_by_pp(plan: Plan) -> str | None:
    if plan.layout.num_layer_list:
        return None
    return indivisible("layers", plan.shape.num_hidden_layers, "PP {} (or give num_layer_list)", plan.layout.pp)


@rule("num_layer_list has PP numbers, and PP is above 1.", ARGUMENTS, 1094,
      "if len(args.num_layer_list.split(',')) != args.pipeline_model_parallel_size:")
def layer_list_has_a_number_for_each_stage(plan: Plan) -> str | None:
    given, pp = plan.layout.num_layer_list, plan.layout.pp
    if given and (len(given) != pp or pp == 1):
        remedy = "; leave it out without pipeline" if pp == 1 else ""
        return f"num_layer_list {_listed(given)} has {len(given)} numbers for PP {pp}{remedy}"
    return None


@rule("num_layer_list sums to the model's layers, and no stage is empty.", ARGUMENTS, 1159,
      "if config.layer_offset[args.pipeline_model_parallel_size] != args.num_layers:")
def layer_list_sums_to_the_layers(plan: Plan) -> str | None:
    given = plan.layout.num_layer_list
    if given and (sum(given) != plan.shape.num_hidden_layers or not all(given)):
        return (f"num_layer_list {_listed(given)} sums to {sum(given)}, the model has {plan.shape.num_hidden_layers} "
                "layers; a stage has at least 1")
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@rule("A virtual pipeline needs PP above 1, no num_layer_list, and stages that are a multiple of its layers.",
      "Megatron-LM megatron/training/arguments.py", 461,
      "assert num_layers_per_pipeline_stage % args.num_layers_per_virtual_pipeline_stage == 0, \\")
def virtual_stages(plan: Plan) -> str | None:
    layout, layers = plan.layout, plan.layout.layers_per_virtual_stage
    if layers is None:
        return None
    if layout.pp == 1 or layout.num_layer_list:
        return (f"num_layers_per_virtual_pipeline_stage {layers} needs PP above 1 (it is {layout.pp}) and no "
                "num_layer_list")
    stage = plan.shape.num_hidden_layers // layout.pp
    return indivisible("layers a stage", stage, "{} layers a virtual stage", layers)


@rule("A reference on the shared backbone goes with no virtual pipeline: only the first chunk's adapters are switched "
      "off for it.", "MindSpeed-RL mindspeed_rl/workers/integrated_worker.py", 171,
      "with self.ref_model[0].module.module.disable_adapter():")
def shared_backbone_has_one_chunk(plan: Plan) -> str | None:
    layers = plan.layout.layers_per_virtual_stage
    if plan.share_backbone and layers is not None:
        return (f"share_backbone with num_layers_per_virtual_pipeline_stage {layers}: only the first chunk's adapters "
                "would be off for the reference")
    return None


@rule("A reference on the shared backbone needs LoRA: it is the model without its adapters.", VALIDATION, 288,
      "if not actor_config.lora_target_modules:")
def shared_backbone_has_adapters(plan: Plan) -> str | None:
    if plan.share_backbone and not plan.lora:
        return "share_backbone needs LoRA: the reference is the model without its adapters"
    return None


@rule("With Ulysses context parallelism, heads are a multiple of TP x CP and seq_length of CP.",
      "MindSpeed mindspeed/features_manager/context_parallel/ulysses_context_parallel.py", 32,
      "if not (head >= 1 and remainder == 0):")
def context_parallel_heads(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.cp == 1 or layout.cp_algorithm != CP_ALGORITHMS[0]:
        return None
    return (indivisible("attention heads", plan.shape.num_attention_heads, "TP {} x CP {}", layout.tp, layout.cp)
            or indivisible("tokens of seq_length", plan.batch.seq_length, "CP {}", layout.cp))


@rule("Context parallelism is ulysses_cp_algo or megatron_cp_algo.", VALIDATION, 56,
      'if actor_config.context_parallel_algo not in ["ulysses_cp_algo", "megatron_cp_algo"]:')
def context_parallel_algorithm(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.cp > 1 and layout.cp_algorithm not in CP_ALGORITHMS:
        return f"CP {layout.cp} with {layout.cp_algorithm}: upstream has {' and '.join(CP_ALGORITHMS)}"
    return None


@rule("A dense model has EP 1.", TRANSFORMER, 621,
      "raise ValueError('num_moe_experts must be non None to use expert-parallel.')")
def dense_model_without_ep(plan: Plan) -> str | None:
    if plan.layout.ep > 1 and not plan.shape.moe:
        return (f"EP {plan.layout.ep} with a dense model: there are no experts to divide: set "
                "actor_config.expert_model_parallel_size=1")
    return None


@rule("Experts are a multiple of TP x EP: with moe_tp_extend_ep the TP ranks hold whole experts too.",
      "MindSpeed mindspeed/features_manager/moe/tp_extend_ep.py", 22,
      "if args.num_experts % (args.tensor_model_parallel_size * args.expert_model_parallel_size) != 0:")
def experts_by_training_ranks(plan: Plan) -> str | None:
    layout = plan.layout
    return indivisible("experts", plan.shape.num_experts, "TP {} x EP {}", layout.tp, layout.ep)


@rule("A mixture of experts needs moe_tp_extend_ep: the weight sync knows experts in no other form, and vLLM's would "
      "stay zero.", CONTAINER, 189, "if(self.moe_tp_extend_ep and self._infer_ep_size >= self._ep_size):")
def experts_are_whole(plan: Plan) -> str | None:
    if plan.shape.moe and not plan.layout.tp_extend_ep:
        return ("moe_tp_extend_ep = False must be True for a mixture of experts: without it vLLM's experts stay zero, "
                "or the first sync fails")
    return None


@rule("A mixture of experts with TP above 1 needs sequence_parallel.",
      "Megatron-LM megatron/core/transformer/moe/moe_layer.py", 133, "and not self.config.sequence_parallel")
def experts_need_sequence_parallelism(plan: Plan) -> str | None:
    tp = plan.layout.tp
    if plan.shape.moe and tp > 1 and not plan.layout.sequence_parallel:
        return f"sequence_parallel must be true for a mixture of experts with tensor_model_parallel_size = {tp}"
    return None


@rule("A mixture of experts without LoRA needs TP x EP above 1: the TP-to-EP dispatcher returns a variable that it "
      "sets only there. With LoRA MindSpeed-LLM builds the other dispatcher.",
      "MindSpeed mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py", 154,
      "return num_tokens_per_local_expert")
def dispatcher_has_ranks(plan: Plan) -> str | None:
    layout = plan.layout
    if plan.shape.moe and not plan.lora and layout.tp_extend_ep and layout.tp * layout.ep == 1:
        return "TP 1 x EP 1 without LoRA: MindSpeed's TP-to-EP dispatcher needs at least 2 ranks"
    return None
