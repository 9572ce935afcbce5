"""What upstream demands of a layout and a batch: each rule one function of a plan, with the line of upstream that it comes from.

A rule returns None, or one sentence with the numbers. The first line of its docstring says the rule, the last one the source as
`repository path:line: text of that line` (tests/upstream compares it with the checkouts). A rule that upstream does not state itself
says what would happen without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspeed_qerl.layout.plan import Plan

Rule = Callable[[Plan], str | None]
VLLM_VOCABULARY_MULTIPLE = 64  # vLLM pads the embedding to it (vocab_parallel_embedding.py:23)
CP_ALGORITHMS = ("ulysses_cp_algo", "megatron_cp_algo")


@dataclass(frozen=True)
class Broken:
    """A rule that a plan breaks: its name, one sentence with the numbers, and the line of upstream behind it."""

    rule: str
    message: str
    source: str


def broken(plan: Plan, rules: Iterable[Rule] | None = None) -> list[Broken]:
    """Every rule that the plan breaks, of all rules or of some; [] for a plan that upstream would run."""
    return [Broken(rule.__name__, message, source(rule)) for rule in (RULES if rules is None else rules) if (message := rule(plan))]


def statement(rule: Rule) -> str:
    """The rule in words."""
    return " ".join((rule.__doc__ or "").split("\n\n")[0].split())


def citation(rule: Rule) -> tuple[str, str, int, str]:
    """Repository, path, line and text of the line that the rule comes from."""
    place, line, text = (rule.__doc__ or "").rsplit("Source: ", 1)[1].strip().split(":", 2)
    repository, path = place.split(" ", 1)
    return repository, path, int(line), text.strip()


def source(rule: Rule) -> str:
    """`repository path:line`."""
    repository, path, line, _ = citation(rule)
    return f"{repository} {path}:{line}"


def _indivisible(what: str, number: int, by: str, divisor: int) -> str | None:
    """The sentence for a number that leaves a remainder."""
    return f"{number:,} {what} cannot be divided by {by}" if number % divisor else None


# ---- training ----

def ranks_fill_training_groups(plan: Plan) -> str | None:
    """The ranks are a multiple of TP x PP x CP.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:82: if resource.num_npus % product != 0:
    """
    it = plan.layout
    return _indivisible("ranks", it.world, f"TP {it.tp} x PP {it.pp} x CP {it.cp} = {it.tp * it.pp * it.cp}", it.tp * it.pp * it.cp)


def ranks_fill_expert_groups(plan: Plan) -> str | None:
    """The ranks are a multiple of TP x EP x PP.

    Source: Megatron-LM megatron/core/parallel_state.py:700: if decoder_world_size % expert_tensor_model_pipeline_parallel_size != 0:
    """
    it = plan.layout
    return _indivisible("ranks", it.world, f"TP {it.tp} x EP {it.ep} x PP {it.pp} = {it.tp * it.ep * it.pp}", it.tp * it.ep * it.pp)


def ranks_fill_nodes(plan: Plan) -> str | None:
    """With more ranks than a node has, every node is full: upstream starts as many actors on each.

    Source: MindSpeed-RL mindspeed_rl/workers/scheduler/launcher.py:241: for bundle_index in range(0, self.num_devices_per_node):
    """
    return _indivisible("ranks", plan.layout.world, f"{plan.layout.node_width} ranks a node", plan.layout.node_width)


def heads_by_tp(plan: Plan) -> str | None:
    """Attention heads are a multiple of TP.

    Source: Megatron-LM megatron/core/transformer/transformer_config.py:559: if self.num_attention_heads % self.tensor_model_parallel_size != 0:
    """
    return _indivisible("attention heads", plan.shape.num_attention_heads, f"TP {plan.layout.tp}", plan.layout.tp)


def kv_heads_by_tp(plan: Plan) -> str | None:
    """KV heads are a multiple of TP.

    Source: Megatron-LM megatron/core/transformer/transformer_config.py:574: if self.num_query_groups % self.tensor_model_parallel_size != 0:
    """
    return _indivisible("KV heads", plan.shape.num_key_value_heads, f"TP {plan.layout.tp}", plan.layout.tp)


def width_by_tp(plan: Plan) -> str | None:
    """The width of a dense MLP or a shared expert is a multiple of TP.

    Source: Megatron-LM megatron/core/tensor_parallel/layers.py:765: self.output_size_per_partition = divide(output_size, world_size)
    """
    shape, tp = plan.shape, plan.layout.tp
    return (_indivisible("columns of the MLP", shape.intermediate_size, f"TP {tp}", tp)
            or _indivisible("columns of the shared expert", shape.shared_expert_intermediate_size, f"TP {tp}", tp))


def vocabulary_by_tp(plan: Plan) -> str | None:
    """The rows of the embedding are a multiple of TP.

    Source: Megatron-LM megatron/core/tensor_parallel/utils.py:110: per_partition_vocab_size = divide(global_vocab_size, world_size)
    """
    return _indivisible("rows of the embedding", plan.padded_vocab_size or vllm_vocabulary(plan), f"TP {plan.layout.tp}", plan.layout.tp)


def vocabulary_is_vllms(plan: Plan) -> str | None:
    """Megatron's embedding has the rows of vLLM's: the model's vocabulary, padded to a multiple of 64.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/memory_buffer.py:59: buffer_tensor = buffer_tensor.view(param.shape)
    """
    rows, wanted = plan.padded_vocab_size, vllm_vocabulary(plan)
    if rows is not None and rows != wanted:
        return f"padded_vocab_size {rows:,} must be {wanted:,}, the rows of vLLM's embedding for a vocabulary of {plan.shape.vocab_size:,}"
    return None


def vllm_vocabulary(plan: Plan) -> int:
    """Rows of vLLM's embedding, all ranks together."""
    return -(-plan.shape.vocab_size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE


def layers_by_pp(plan: Plan) -> str | None:
    """Layers are a multiple of PP, or num_layer_list says how many each stage has.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:274: if self._num_hidden_layers % self._pp_size != 0:
    """
    if plan.layout.num_layer_list:
        return None
    return _indivisible("layers", plan.shape.num_hidden_layers, f"PP {plan.layout.pp} (or say num_layer_list)", plan.layout.pp)


def layer_list_has_a_number_for_each_stage(plan: Plan) -> str | None:
    """num_layer_list has PP numbers, and PP is above 1.

    Source: MindSpeed-LLM mindspeed_llm/training/arguments.py:1094: if len(args.num_layer_list.split(',')) != args.pipeline_model_parallel_size:
    """
    given, pp = plan.layout.num_layer_list, plan.layout.pp
    if given and (len(given) != pp or pp == 1):
        return f"num_layer_list {_listed(given)} has {len(given)} numbers for PP {pp}" + ("; leave it out without pipeline" if pp == 1 else "")
    return None


def layer_list_sums_to_the_layers(plan: Plan) -> str | None:
    """num_layer_list sums to the model's layers, and no stage is empty.

    Source: MindSpeed-LLM mindspeed_llm/training/arguments.py:1159: if config.layer_offset[args.pipeline_model_parallel_size] != args.num_layers:
    """
    given = plan.layout.num_layer_list
    if given and (sum(given) != plan.shape.num_hidden_layers or not all(given)):
        return f"num_layer_list {_listed(given)} sums to {sum(given)}, the model has {plan.shape.num_hidden_layers} layers; a stage has at least 1"
    return None


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def virtual_stages(plan: Plan) -> str | None:
    """A virtual pipeline needs PP above 1, no num_layer_list, and stages that are a multiple of its layers.

    Source: Megatron-LM megatron/training/arguments.py:461: assert num_layers_per_pipeline_stage % args.num_layers_per_virtual_pipeline_stage == 0, \\
    """
    it, layers = plan.layout, plan.layout.layers_per_virtual_stage
    if layers is None:
        return None
    if it.pp == 1 or it.num_layer_list:
        return f"num_layers_per_virtual_pipeline_stage {layers} needs PP above 1 (it is {it.pp}) and no num_layer_list"
    return _indivisible("layers a stage", plan.shape.num_hidden_layers // it.pp, f"{layers} layers a virtual stage", layers)


def shared_backbone_has_one_chunk(plan: Plan) -> str | None:
    """A reference on the shared backbone goes with no virtual pipeline: only the first chunk's adapters are switched off for it.

    Source: MindSpeed-RL mindspeed_rl/workers/integrated_worker.py:171: with self.ref_model[0].module.module.disable_adapter():
    """
    if plan.share_backbone and plan.layout.layers_per_virtual_stage is not None:
        return (f"share_backbone with num_layers_per_virtual_pipeline_stage {plan.layout.layers_per_virtual_stage}: only the first chunk's "
                "adapters would be off for the reference")
    return None


def shared_backbone_has_adapters(plan: Plan) -> str | None:
    """A reference on the shared backbone needs LoRA: it is the model without its adapters.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:288: if not actor_config.lora_target_modules:
    """
    return "share_backbone needs LoRA: the reference is the model without its adapters" if plan.share_backbone and not plan.lora else None


def context_parallel_heads(plan: Plan) -> str | None:
    """With Ulysses context parallelism, heads are a multiple of TP x CP and seq_length of CP.

    Source: MindSpeed mindspeed/features_manager/context_parallel/ulysses_context_parallel.py:32: if not (head >= 1 and remainder == 0):
    """
    it = plan.layout
    if it.cp == 1 or it.cp_algorithm != CP_ALGORITHMS[0]:
        return None
    return (_indivisible("attention heads", plan.shape.num_attention_heads, f"TP {it.tp} x CP {it.cp} = {it.tp * it.cp}", it.tp * it.cp)
            or _indivisible("tokens of seq_length", plan.batch.seq_length, f"CP {it.cp}", it.cp))


def context_parallel_algorithm(plan: Plan) -> str | None:
    """Context parallelism is ulysses_cp_algo or megatron_cp_algo.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:56: if actor_config.context_parallel_algo not in ["ulysses_cp_algo", "megatron_cp_algo"]:
    """
    it = plan.layout
    if it.cp > 1 and it.cp_algorithm not in CP_ALGORITHMS:
        return f"CP {it.cp} with {it.cp_algorithm}: upstream has {' and '.join(CP_ALGORITHMS)}"
    return None


def dense_model_without_ep(plan: Plan) -> str | None:
    """A dense model has EP 1.

    Source: Megatron-LM megatron/core/transformer/transformer_config.py:621: raise ValueError('num_moe_experts must be non None to use expert-parallel.')
    """
    return f"EP {plan.layout.ep} with a dense model: there are no experts to divide" if plan.layout.ep > 1 and not plan.shape.moe else None


def experts_by_training_ranks(plan: Plan) -> str | None:
    """Experts are a multiple of TP x EP: with moe_tp_extend_ep the TP ranks hold whole experts too.

    Source: MindSpeed mindspeed/features_manager/moe/tp_extend_ep.py:22: if args.num_experts % (args.tensor_model_parallel_size * args.expert_model_parallel_size) != 0:
    """
    it = plan.layout
    return _indivisible("experts", plan.shape.num_experts, f"TP {it.tp} x EP {it.ep} = {it.tp * it.ep}", it.tp * it.ep)


def experts_are_whole(plan: Plan) -> str | None:
    """A mixture of experts needs moe_tp_extend_ep: the weight sync knows experts in no other form, and vLLM's would stay zero.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:189: if(self.moe_tp_extend_ep and self._infer_ep_size >= self._ep_size):
    """
    return ("moe_tp_extend_ep = False must be True for a mixture of experts: without it vLLM's experts stay zero, or the first sync fails"
            if plan.shape.moe and not plan.layout.tp_extend_ep else None)


def experts_need_sequence_parallelism(plan: Plan) -> str | None:
    """A mixture of experts with TP above 1 needs sequence_parallel.

    Source: Megatron-LM megatron/core/transformer/moe/moe_layer.py:133: and not self.config.sequence_parallel
    """
    if plan.shape.moe and plan.layout.tp > 1 and not plan.layout.sequence_parallel:
        return f"sequence_parallel must be true for a mixture of experts with tensor_model_parallel_size = {plan.layout.tp}"
    return None


def dispatcher_has_ranks(plan: Plan) -> str | None:
    """A mixture of experts without LoRA needs TP x EP above 1: the TP-to-EP dispatcher returns a variable that it sets only there. With LoRA
    MindSpeed-LLM builds the other dispatcher.

    Source: MindSpeed mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/token_dispatcher.py:154: return num_tokens_per_local_expert
    """
    it = plan.layout
    if plan.shape.moe and not plan.lora and it.tp_extend_ep and it.tp * it.ep == 1:
        return "TP 1 x EP 1 without LoRA: MindSpeed's TP-to-EP dispatcher needs at least 2 ranks"
    return None


# ---- rollout ----

def no_infer_pipeline(plan: Plan) -> str | None:
    """vLLM has no pipeline parallelism.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:169: if generate_config.infer_pipeline_parallel_size > 1:
    """
    return f"infer PP {plan.layout.infer_pp} must be 1" if plan.layout.infer_pp > 1 else None


def ranks_fill_infer_groups(plan: Plan) -> str | None:
    """The ranks are a multiple of infer TP x EP; a rank left over would be in no expert group.

    Source: MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py:267: num_expert_groups: int = infer_data_parallel_size * context_parallel_size // expert_model_parallel_size
    """
    it = plan.layout
    return _indivisible("ranks", it.world, f"infer TP {it.infer_tp} x EP {it.infer_ep} = {it.infer_tp * it.infer_ep}", it.infer_tp * it.infer_ep)


def infer_groups_hold_whole_training_groups(plan: Plan) -> str | None:
    """Infer TP x EP is a multiple of training's TP x EP: the sync cuts a training rank's experts into shares, and never joins two ranks'.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:156: if self._infer_ep_size % self._ep_size != 0:
    """
    it = plan.layout
    training = it.tp * it.ep if it.tp_extend_ep else it.ep
    if it.infer_tp * it.infer_ep % training:
        return (f"infer TP {it.infer_tp} x EP {it.infer_ep} = {it.infer_tp * it.infer_ep} is no multiple of training's TP {it.tp} x EP {it.ep} = "
                f"{training}")
    return None


def tensor_parallel_sizes_divide(plan: Plan) -> str | None:
    """Of training's TP and infer TP, one is a multiple of the other.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:651: if self._infer_tp_size % self._tp_size != 0:
    """
    tp, infer_tp = plan.layout.tp, plan.layout.infer_tp
    return f"TP {tp} and infer TP {infer_tp}: neither is a multiple of the other" if max(tp, infer_tp) % min(tp, infer_tp) else None


def stages_hold_whole_infer_tp_groups(plan: Plan) -> str | None:
    """With infer TP above training's, a pipeline stage's ranks are a multiple of infer TP.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:174: (self._world_size // self._pp_size) % self._infer_tp_size != 0):
    """
    it = plan.layout
    if it.tp >= it.infer_tp:
        return None
    return _indivisible(f"ranks a stage ({it.world} / PP {it.pp})", it.world // it.pp, f"infer TP {it.infer_tp}", it.infer_tp)


def heads_by_infer_tp(plan: Plan) -> str | None:
    """Attention heads are a multiple of infer TP.

    Source: vllm vllm/config/model.py:1048: if total_num_attention_heads % tensor_parallel_size != 0:
    """
    return _indivisible("attention heads", plan.shape.num_attention_heads, f"infer TP {plan.layout.infer_tp}", plan.layout.infer_tp)


def kv_heads_by_infer_tp(plan: Plan) -> str | None:
    """KV heads are a multiple of infer TP: vLLM could repeat them, the sync cannot.

    Source: MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py:160: ng = hf_config.num_key_value_heads // infer_tensor_parallel_size
    """
    return _indivisible("KV heads", plan.shape.num_key_value_heads, f"infer TP {plan.layout.infer_tp}", plan.layout.infer_tp)


def width_by_infer_tp(plan: Plan) -> str | None:
    """The width of a dense MLP or a shared expert is a multiple of infer TP.

    Source: vllm vllm/model_executor/layers/linear.py:1250: self.input_size_per_partition = divide(input_size, self.tp_size)
    """
    shape, tp = plan.shape, plan.layout.infer_tp
    return (_indivisible("columns of the MLP", shape.intermediate_size, f"infer TP {tp}", tp)
            or _indivisible("columns of the shared expert", shape.shared_expert_intermediate_size, f"infer TP {tp}", tp))


def vocabulary_by_infer_tp(plan: Plan) -> str | None:
    """The rows of vLLM's embedding are a multiple of infer TP.

    Source: vllm vllm/model_executor/layers/vocab_parallel_embedding.py:263: self.num_embeddings_per_partition = divide(self.num_embeddings_padded,
    """
    return _indivisible("rows of vLLM's embedding", vllm_vocabulary(plan), f"infer TP {plan.layout.infer_tp}", plan.layout.infer_tp)


def experts_by_infer_ranks(plan: Plan) -> str | None:
    """Experts are a multiple of infer TP x EP.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:500: expert_pernode = int(self.num_experts / self._infer_ep_size_raw / self._infer_tp_size)
    """
    it = plan.layout
    return _indivisible("experts", plan.shape.num_experts, f"infer TP {it.infer_tp} x EP {it.infer_ep} = {it.infer_tp * it.infer_ep}",
                        it.infer_tp * it.infer_ep)


def infer_experts_are_spread(plan: Plan) -> str | None:
    """A mixture of experts needs infer TP x EP above 1: the first sync fails on a group of one.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:569: src = src_router[cur_rank % infer_tp_ep_size]
    """
    if plan.shape.moe and plan.layout.infer_tp * plan.layout.infer_ep == 1:
        return "infer TP 1 x EP 1 with a mixture of experts: the first weight sync fails; at least 2 ranks must share vLLM's experts"
    return None


def infer_experts_are_whole(plan: Plan) -> str | None:
    """A mixture of experts with infer TP x EP above 1 needs enable_expert_parallel: the sync deals whole experts to vLLM's ranks.

    Source: MindSpeed-RL mindspeed_rl/workers/resharding/vllm_weight_container.py:140: self._infer_ep_size = self._infer_ep_size * self._infer_tp_size
    """
    it = plan.layout
    if plan.shape.moe and it.infer_tp * it.infer_ep > 1 and not it.enable_expert_parallel:
        return (f"enable_expert_parallel must be true for a mixture of experts with infer TP {it.infer_tp} x EP {it.infer_ep}: the sync deals whole "
                "experts to vLLM's ranks")
    return None


def experts_need_two_ranks(plan: Plan) -> str | None:
    """A mixture of experts needs at least 2 NPUs: vLLM's expert group is not made for one.

    Source: MindSpeed-RL mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py:317: def initialize_model_parallel(
    """
    if plan.shape.moe and plan.layout.world == 1:
        return "a mixture of experts needs at least 2 NPUs: vLLM's expert group is not made for one"
    return None


def answers_fit_vllm(plan: Plan) -> str | None:
    """seq_length is at most max_model_len.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:49: if generate_config.max_model_len < actor_config.seq_length:
    """
    it = plan.batch
    return f"seq_length {it.seq_length} is above max_model_len {it.max_model_len}" if it.seq_length > it.max_model_len else None


def prompts_fit_the_scheduler(plan: Plan) -> str | None:
    """max_num_batched_tokens is at least max_model_len: vLLM-Ascend's scheduler does not cut prompts into chunks.

    Source: vllm-ascend vllm_ascend/core/schedule_config.py:66: if (self.max_num_batched_tokens < self.max_model_len
    """
    it = plan.batch
    return (f"max_num_batched_tokens {it.max_num_batched_tokens} is below max_model_len {it.max_model_len}"
            if it.max_num_batched_tokens < it.max_model_len else None)


# ---- batch ----

def batch_by_training_dp(plan: Plan) -> str | None:
    """global_batch_size is a multiple of training's data-parallel size.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:134: if global_batch_size % data_parallel != 0:
    """
    it = plan.layout
    return _indivisible("prompts of global_batch_size", plan.batch.global_batch_size,
                        f"training DP {it.dp} = {it.world} / (TP {it.tp} x PP {it.pp} x CP {it.cp})", max(it.dp, 1))


def batch_by_infer_dp(plan: Plan) -> str | None:
    """global_batch_size is a multiple of vLLM's replicas, world / infer TP.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:158: generate_config.data_parallel_size = rl_config.actor_resource.num_npus // (
    """
    it = plan.layout
    return _indivisible("prompts of global_batch_size", plan.batch.global_batch_size,
                        f"vLLM's {it.infer_dp} replicas = {it.world} / infer TP {it.infer_tp}", max(it.infer_dp, 1))


def batch_by_nodes(plan: Plan) -> str | None:
    """global_batch_size is a multiple of the nodes: each has one process that scores answers.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:281: if reward_config.global_batch_size % rule_reward_num_process != 0:
    """
    return _indivisible("prompts of global_batch_size", plan.batch.global_batch_size, f"{plan.layout.nodes} nodes", plan.layout.nodes)


def share_by_micro_batch(plan: Plan) -> str | None:
    """A training rank's answers of an iteration are a multiple of micro_batch_size.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:139: if (global_batch_size // data_parallel * n_samples) % micro_batch_size != 0:
    """
    share = plan.batch.global_batch_size // max(plan.layout.dp, 1) * plan.batch.samples_per_prompt
    return _indivisible("answers of a training rank", share, f"micro_batch_size {plan.batch.micro_batch_size}", plan.batch.micro_batch_size)


def mini_batch_by_training_dp(plan: Plan) -> str | None:
    """mini_batch_size x n_samples_per_prompt is a multiple of training's data-parallel size: upstream rounds down, and the answers that are left
    make an update of their own.

    Source: MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py:166: // self.parallel_state.get_data_parallel_world_size(),
    """
    return _indivisible("answers of a mini-batch", plan.batch.mini_answers, f"training DP {plan.layout.dp}", max(plan.layout.dp, 1))


def mini_batches_are_equal(plan: Plan) -> str | None:
    """A training rank's answers of an iteration are a multiple of its mini-batch: those left over would make a small update of their own.

    Source: MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py:515: mini_batches = self._split_batches(data, batch_size=self.mini_batch_size_per_dp,
    """
    dp = max(plan.layout.dp, 1)
    share, mini = plan.batch.answers // dp, plan.batch.mini_answers // dp
    if plan.batch.mini_answers % dp or mini >= share:
        return None  # another rule's case; all answers in one update
    return _indivisible("answers of a training rank", share, f"the {mini} of its mini-batch", mini)


def mini_batch_by_micro_batch(plan: Plan) -> str | None:
    """A training rank's mini-batch is a multiple of micro_batch_size: a smaller last micro-batch would weigh as much as a full one.

    Source: MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py:210: batches = self._split_batches(batch, batch_size=self.micro_batch_size,
    """
    dp = max(plan.layout.dp, 1)
    mini = plan.batch.mini_answers // dp
    if mini >= plan.batch.answers // dp:
        return None  # all answers in one update, whose size is share_by_micro_batch's
    return _indivisible("answers of a rank's mini-batch", mini, f"micro_batch_size {plan.batch.micro_batch_size}", plan.batch.micro_batch_size)


def dispatch_divides_the_answers(plan: Plan) -> str | None:
    """Every dispatch size divides the answers of an iteration.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:312: if global_batch * rl_config.n_samples_per_prompt % experience_count != 0:
    """
    wrong = [f"{key} {size}" for key, size in plan.batch.dispatch.items() if size and plan.batch.answers % size]
    return f"{plan.batch.answers} answers of an iteration cannot be divided by {' or '.join(wrong)}" if wrong else None


def dispatch_is_at_most_a_share(plan: Plan) -> str | None:
    """A dispatch size is at most a rank's share of the answers: of vLLM's replicas for the rollout, of training's ranks for the others.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:377: if dispatch_size and dispatch_size > (global_batch_size * n_samples_per_prompt // data_parallel_size):
    """
    shares = {"actor_rollout_dispatch_size": plan.layout.infer_dp, **{f"{name}_dispatch_size": plan.layout.dp
                                                                     for name in ("actor_logprob", "ref", "actor_update")}}
    wrong = [f"{key} {size} is above the {plan.batch.answers // max(ranks, 1)} answers of each of {ranks} ranks"
             for key, ranks in shares.items() if (size := plan.batch.dispatch.get(key)) and size > plan.batch.answers // max(ranks, 1)]
    return "; ".join(wrong) or None


def rollout_share_by_dispatch(plan: Plan) -> str | None:
    """A vLLM replica's answers are a multiple of actor_rollout_dispatch_size.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:192: rl_config.actor_rollout_dispatch_size,
    """
    size, share = plan.batch.dispatch.get("actor_rollout_dispatch_size"), plan.batch.global_batch_size // max(plan.layout.infer_dp, 1)
    if not size:
        return None
    return _indivisible("answers of a vLLM replica", share * plan.batch.samples_per_prompt, f"actor_rollout_dispatch_size {size}", size)


def whole_prompts_are_dispatched(plan: Plan) -> str | None:
    """actor_rollout_dispatch_size and reward_dispatch_size are multiples of n_samples_per_prompt: these two take whole prompts.

    Source: MindSpeed-RL mindspeed_rl/trainer/utils/transfer_dock.py:436: if experience_count % self.n_samples_per_prompt != 0:
    """
    wrong = [f"{key} {size}" for key in ("actor_rollout_dispatch_size", "reward_dispatch_size")
             if (size := plan.batch.dispatch.get(key)) and size % plan.batch.samples_per_prompt]
    return f"{' and '.join(wrong)}: not a multiple of the {plan.batch.samples_per_prompt} answers of a prompt" if wrong else None


def update_takes_a_mini_batch(plan: Plan) -> str | None:
    """actor_update_dispatch_size is at least a training rank's mini-batch.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:367: if rl_config.actor_update_dispatch_size < rl_config.mini_batch_size / actor_data_parallel_size:
    """
    size, dp = plan.batch.dispatch.get("actor_update_dispatch_size"), max(plan.layout.dp, 1)
    return (f"actor_update_dispatch_size {size} is below the {plan.batch.mini_answers / dp:g} answers of a rank's mini-batch"
            if size and size < plan.batch.mini_answers / dp else None)


def update_takes_every_answer(plan: Plan) -> str | None:
    """actor_update_dispatch_size is a training rank's whole share with guarantee_order, where each rank is dealt that many answers once and the
    others are never trained on; without it, it divides the share, or ranks would differ in their number of updates and wait for ever.

    Source: MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py:306: assign_batch_size=experience_count
    """
    size, share = plan.batch.dispatch.get("actor_update_dispatch_size"), plan.batch.answers // max(plan.layout.dp, 1)
    if not size or size >= share:
        return None
    if plan.batch.guarantee_order:
        return f"actor_update_dispatch_size {size} with guarantee_order: only {size} of the {share} answers of each rank would be trained on"
    return _indivisible("answers of a training rank", share, f"actor_update_dispatch_size {size}", size)


def removed_padding_resets_the_mask(plan: Plan) -> str | None:
    """use_remove_padding needs reset_attention_mask.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:70: if not actor_config.reset_attention_mask:
    """
    return ("use_remove_padding needs megatron_training.reset_attention_mask: true"
            if plan.batch.use_remove_padding and not plan.batch.reset_attention_mask else None)


def removed_padding_varies_in_a_pipeline(plan: Plan) -> str | None:
    """use_remove_padding with PP above 1 needs no_pad_to_seq_lengths.

    Source: MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:64: if actor_config.pipeline_model_parallel_size > 1 and not actor_config.no_pad_to_seq_lengths:
    """
    return (f"use_remove_padding with PP {plan.layout.pp} needs megatron_training.no_pad_to_seq_lengths: true"
            if plan.batch.use_remove_padding and plan.layout.pp > 1 and not plan.batch.no_pad_to_seq_lengths else None)


TRAINING: tuple[Rule, ...] = (
    ranks_fill_training_groups, ranks_fill_expert_groups, ranks_fill_nodes, heads_by_tp, kv_heads_by_tp, width_by_tp, vocabulary_by_tp,
    vocabulary_is_vllms, layers_by_pp, layer_list_has_a_number_for_each_stage, layer_list_sums_to_the_layers, virtual_stages,
    shared_backbone_has_one_chunk, shared_backbone_has_adapters, context_parallel_heads, context_parallel_algorithm, dense_model_without_ep,
    experts_by_training_ranks, experts_are_whole, experts_need_sequence_parallelism, dispatcher_has_ranks)
ROLLOUT: tuple[Rule, ...] = (
    no_infer_pipeline, ranks_fill_infer_groups, infer_groups_hold_whole_training_groups, tensor_parallel_sizes_divide,
    stages_hold_whole_infer_tp_groups, heads_by_infer_tp, kv_heads_by_infer_tp, width_by_infer_tp, vocabulary_by_infer_tp,
    experts_by_infer_ranks, infer_experts_are_spread, infer_experts_are_whole, experts_need_two_ranks, answers_fit_vllm,
    prompts_fit_the_scheduler)
BATCH: tuple[Rule, ...] = (
    batch_by_training_dp, batch_by_infer_dp, batch_by_nodes, share_by_micro_batch, mini_batch_by_training_dp, mini_batches_are_equal,
    mini_batch_by_micro_batch, dispatch_divides_the_answers, dispatch_is_at_most_a_share, rollout_share_by_dispatch,
    whole_prompts_are_dispatched, update_takes_a_mini_batch, update_takes_every_answer, removed_padding_resets_the_mask,
    removed_padding_varies_in_a_pipeline)
RULES: tuple[Rule, ...] = TRAINING + ROLLOUT + BATCH
