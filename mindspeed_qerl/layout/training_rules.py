"""Training: ranks, pipeline stages, tensor and context parallelism, experts."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rule import (
    CONTAINER,
    TRANSFORMER,
    VALIDATION,
    Rule,
    indivisible,
    multiple,
    multiple_widths,
)

HEADS = "shape.num_attention_heads"
CP_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo")


def _layer_list_has_a_number_for_each_stage(plan: Plan) -> str | None:
    given, pp = plan.layout.num_layer_list, plan.layout.pp
    if given and (len(given) != pp or pp == 1):
        return f"num_layer_list {_numbers(given)} has {len(given)} numbers for PP {pp}"
    return None


def _layer_list_sums_to_the_layers(plan: Plan) -> str | None:
    given, layers = plan.layout.num_layer_list, plan.shape.num_hidden_layers
    if given and (sum(given) != layers or not all(given)):
        return (
            f"num_layer_list {_numbers(given)} sums to {sum(given)}, the model has {layers} "
            "layers; a stage has at least 1"
        )
    return None


def _numbers(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def _virtual_stages(plan: Plan) -> str | None:
    layout = plan.layout
    layers = layout.layers_per_virtual_stage
    if not layers:
        return None
    if layout.pp == 1 or layout.num_layer_list:
        return (
            f"num_layers_per_virtual_pipeline_stage {layers} needs PP above 1 (it is {layout.pp}) "
            "and no num_layer_list"
        )
    stage = plan.shape.num_hidden_layers // layout.pp
    return indivisible("layers a stage", stage, f"{layers} layers a virtual stage", layers)


TRAINING = (
    Rule(
        # The ranks are a multiple of TP x PP x CP.
        "ranks_fill_training_groups",
        f"{VALIDATION}:82",
        multiple("ranks", "layout.world", "layout.tp", "layout.pp", "layout.cp"),
    ),
    Rule(
        # The ranks are a multiple of TP x EP x PP.
        "ranks_fill_expert_groups",
        "Megatron-LM megatron/core/parallel_state.py:700",
        multiple("ranks", "layout.world", "layout.tp", "layout.ep", "layout.pp"),
    ),
    Rule(
        # With more ranks than a node has, every node is full: upstream starts as many actors on
        # each.
        "ranks_fill_nodes",
        "MindSpeed-RL mindspeed_rl/workers/scheduler/launcher.py:241",
        multiple("ranks", "layout.world", "layout.node_width"),
    ),
    Rule(
        # Attention heads are a multiple of TP.
        "heads_by_tp",
        f"{TRANSFORMER}:559",
        multiple("attention heads", HEADS, "layout.tp"),
    ),
    Rule(
        # KV heads are a multiple of TP.
        "kv_heads_by_tp",
        f"{TRANSFORMER}:574",
        multiple("KV heads", "shape.num_key_value_heads", "layout.tp"),
    ),
    Rule(
        # The width of a dense MLP or a shared expert is a multiple of TP.
        "width_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/layers.py:765",
        multiple_widths("layout.tp"),
    ),
    Rule(
        # The rows of the embedding are a multiple of TP.
        "vocabulary_by_tp",
        "Megatron-LM megatron/core/tensor_parallel/utils.py:110",
        multiple("rows of the embedding", "rows", "layout.tp"),
    ),
    Rule(
        # Megatron's embedding has the rows of vLLM's: the model's vocabulary, padded to a multiple
        # of 64.
        "vocabulary_is_vllms",
        "MindSpeed-RL mindspeed_rl/workers/resharding/memory_buffer.py:59",
        lambda plan: (
            plan.rows != plan.vllm_rows
            and f"padded_vocab_size {plan.rows:,} must be {plan.vllm_rows:,}, the rows of vLLM's "
            f"embedding for a vocabulary of {plan.shape.vocab_size:,}"
        ),
    ),
    Rule(
        # Layers are a multiple of PP, or num_layer_list says how many each stage has.
        "layers_by_pp",
        f"{CONTAINER}:274",
        lambda plan: (
            not plan.layout.num_layer_list
            and indivisible(
                "layers",
                plan.shape.num_hidden_layers,
                f"PP {plan.layout.pp} (or give num_layer_list)",
                plan.layout.pp,
            )
        ),
    ),
    Rule(
        # num_layer_list has PP numbers, and PP is above 1.
        "layer_list_has_a_number_for_each_stage",
        "MindSpeed-LLM mindspeed_llm/features_manager/pipeline_parallel/num_layer_list.py:27",
        _layer_list_has_a_number_for_each_stage,
    ),
    Rule(
        # num_layer_list sums to the model's layers, and no stage is empty.
        "layer_list_sums_to_the_layers",
        "MindSpeed-LLM mindspeed_llm/training/arguments.py:1159",
        _layer_list_sums_to_the_layers,
    ),
    Rule(
        # A virtual pipeline needs PP above 1, no num_layer_list, and stages that are a multiple of
        # its layers.
        "virtual_stages",
        "Megatron-LM megatron/training/arguments.py:461",
        _virtual_stages,
    ),
    Rule(
        # A virtual pipeline has more than one virtual stage a stage.
        "virtual_stages_are_several",
        "MindSpeed mindspeed/features_manager/megatron_basic/megatron_basic.py:22",
        lambda plan: (
            plan.layout.layers_per_virtual_stage
            and plan.layout.layers_per_virtual_stage * plan.layout.pp
            == plan.shape.num_hidden_layers
            and "num_layers_per_virtual_pipeline_stage "
            f"{plan.layout.layers_per_virtual_stage} x PP {plan.layout.pp} are all "
            f"{plan.shape.num_hidden_layers} layers, one virtual stage a stage: leave it out"
        ),
    ),
    Rule(
        # A reference on the shared backbone goes with no virtual pipeline: only the first chunk's
        # adapters are switched off for it.
        "shared_backbone_has_one_chunk",
        "MindSpeed-RL mindspeed_rl/workers/integrated_worker.py:171",
        lambda plan: (
            plan.share_backbone
            and plan.layout.layers_per_virtual_stage is not None
            and "share_backbone with num_layers_per_virtual_pipeline_stage "
            f"{plan.layout.layers_per_virtual_stage}: only the first chunk's adapters would be off "
            "for the reference"
        ),
    ),
    Rule(
        # A reference on the shared backbone needs LoRA: it is the model without its adapters.
        "shared_backbone_has_adapters",
        f"{VALIDATION}:288",
        lambda plan: (
            plan.share_backbone
            and not plan.lora
            and "share_backbone needs LoRA: the reference is the model without its adapters"
        ),
    ),
    Rule(
        # With Ulysses context parallelism, heads are a multiple of TP x CP.
        "context_parallel_heads",
        "MindSpeed mindspeed/features_manager/context_parallel/ulysses_context_parallel.py:32",
        lambda plan: (
            plan.layout.cp > 1
            and plan.layout.cp_algorithm == CP_ALGORITHMS[0]
            and multiple("attention heads", HEADS, "layout.tp", "layout.cp")(plan)
        ),
    ),
    Rule(
        # With context parallelism of either kind, seq_length is a multiple of 2 x CP.
        "context_parallel_chunks",
        "Megatron-LM megatron/training/arguments.py:684",
        lambda plan: (
            plan.layout.cp > 1
            and indivisible(
                "tokens of seq_length",
                plan.batch.seq_length,
                f"2 x CP {plan.layout.cp} = {2 * plan.layout.cp}",
                2 * plan.layout.cp,
            )
        ),
    ),
    Rule(
        # Context parallelism is ulysses_cp_algo or megatron_cp_algo.
        "context_parallel_algorithm",
        f"{VALIDATION}:56",
        lambda plan: (
            plan.layout.cp > 1
            and plan.layout.cp_algorithm not in CP_ALGORITHMS
            and f"CP {plan.layout.cp} with {plan.layout.cp_algorithm}: upstream has "
            f"{' and '.join(CP_ALGORITHMS)}"
        ),
    ),
    Rule(
        # A dense model has EP 1.
        "dense_model_without_ep",
        f"{TRANSFORMER}:621",
        lambda plan: (
            plan.layout.ep > 1
            and not plan.shape.moe
            and f"EP {plan.layout.ep} with a dense model: there are no experts to "
            "divide: set actor_config.expert_model_parallel_size=1"
        ),
    ),
    Rule(
        # Experts are a multiple of TP x EP: with moe_tp_extend_ep the TP ranks hold whole experts
        # too.
        "experts_by_training_ranks",
        "MindSpeed mindspeed/features_manager/moe/tp_extend_ep.py:22",
        multiple("experts", "shape.num_experts", "layout.tp", "layout.ep"),
    ),
    Rule(
        # A mixture of experts needs moe_tp_extend_ep: the weight sync knows experts in no other
        # form, and vLLM's would stay zero.
        "experts_are_whole",
        f"{CONTAINER}:189",
        lambda plan: (
            plan.shape.moe
            and not plan.layout.tp_extend_ep
            and "moe_tp_extend_ep = False must be True for a mixture of experts: without it "
            "vLLM's experts stay zero, or the first sync fails"
        ),
    ),
    Rule(
        # A mixture of experts with TP above 1 needs sequence_parallel.
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
    Rule(
        # A mixture of experts without LoRA needs TP x EP above 1: the TP-to-EP dispatcher returns a
        # variable that it sets only there. With LoRA MindSpeed-LLM builds the other dispatcher.
        "dispatcher_has_ranks",
        "MindSpeed mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py:154",
        lambda plan: (
            plan.shape.moe
            and not plan.lora
            and plan.layout.tp_extend_ep
            and plan.layout.tp * plan.layout.ep == 1
            and "TP 1 x EP 1 without LoRA: MindSpeed's TP-to-EP dispatcher needs at least 2 ranks"
        ),
    ),
)
