"""How a plan breaks a rule, where the table of rules.yaml cannot say it.

Each function has the name of its rule. It returns the sentence that a plan is told, or whether the
rule's `multiple` counts and its `message` is told.
"""

from mindspeed_qerl.layout.plan import Plan

ULYSSES = "ulysses_cp_algo"


def indivisible(what: str, number: int, by: str, size: int) -> str | None:
    """The sentence for a number that is no multiple of `size`, which `by` names.

    >>> indivisible("ranks", 10, "TP 4", 4)
    '10 ranks cannot be divided by TP 4'
    """
    return f"{number:,} {what} cannot be divided by {by}" if number % size else None


# ---- training ----


def vocabulary_is_vllms(plan: Plan) -> bool:
    return plan.rows != plan.vllm_rows


def layers_by_pp(plan: Plan) -> bool:
    is_left_over = plan.shape.num_hidden_layers % plan.layout.pp > 0
    return is_left_over and not plan.layout.num_layer_list


def layer_list_has_a_number_for_each_stage(plan: Plan) -> str | None:
    given, pp = plan.layout.num_layer_list, plan.layout.pp
    if given and (len(given) != pp or pp == 1):
        return f"num_layer_list {_numbers(given)} has {len(given)} numbers for PP {pp}"
    return None


def layer_list_sums_to_the_layers(plan: Plan) -> str | None:
    given, layers = plan.layout.num_layer_list, plan.shape.num_hidden_layers
    if given and (sum(given) != layers or not all(given)):
        return (
            f"num_layer_list {_numbers(given)} sums to {sum(given)}, the model has {layers} "
            "layers; a stage has at least 1"
        )
    return None


def _numbers(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def virtual_stages(plan: Plan) -> str | None:
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


def virtual_stages_are_several(plan: Plan) -> bool:
    layers = plan.layout.layers_per_virtual_stage or 0
    return layers * plan.layout.pp == plan.shape.num_hidden_layers


def shared_backbone_has_one_chunk(plan: Plan) -> bool:
    return plan.share_backbone and plan.layout.layers_per_virtual_stage is not None


def context_parallel_heads(plan: Plan) -> bool:
    return plan.layout.cp > 1 and plan.layout.cp_algorithm == ULYSSES


def context_parallel_chunks(plan: Plan) -> str | None:
    cp = plan.layout.cp
    if cp == 1:
        return None
    tokens, by = plan.batch.seq_length, f"2 x CP {cp} = {2 * cp}"
    return indivisible("tokens of seq_length", tokens, by, 2 * cp)


def context_parallel_algorithm(plan: Plan) -> bool:
    return plan.layout.cp > 1 and plan.layout.cp_algorithm not in (ULYSSES, "megatron_cp_algo")


def dense_model_without_ep(plan: Plan) -> bool:
    return plan.layout.ep > 1 and not plan.shape.moe


def experts_need_sequence_parallelism(plan: Plan) -> bool:
    return plan.shape.moe and plan.layout.tp > 1 and not plan.layout.sequence_parallel


def dispatcher_has_ranks(plan: Plan) -> bool:
    layout = plan.layout
    extended = plan.shape.moe and layout.tp_extend_ep
    return extended and not plan.lora and layout.tp * layout.ep == 1


# ---- rollout ----


def no_infer_pipeline(plan: Plan) -> bool:
    return plan.layout.infer_pp > 1


def infer_groups_hold_whole_training_groups(plan: Plan) -> str | None:
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


def tensor_parallel_sizes_divide(plan: Plan) -> bool:
    sizes = plan.layout.tp, plan.layout.infer_tp
    return max(sizes) % min(sizes) > 0


def stages_hold_whole_infer_tp_groups(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.tp >= layout.infer_tp:
        return None
    ranks, by = layout.world // layout.pp, f"infer TP {layout.infer_tp}"
    return indivisible(
        f"ranks a stage ({layout.world} / PP {layout.pp})", ranks, by, layout.infer_tp
    )


def infer_experts_are_spread(plan: Plan) -> bool:
    return plan.shape.moe and plan.layout.infer_tp * plan.layout.infer_ep == 1


def infer_experts_are_whole(plan: Plan) -> bool:
    layout = plan.layout
    spread = plan.shape.moe and layout.infer_tp * layout.infer_ep > 1
    return spread and not layout.enable_expert_parallel


def shared_expert_is_summed(plan: Plan) -> bool:
    return plan.layout.infer_tp > 1 and plan.shape.shared_expert_intermediate_size > 0


def two_ranks(plan: Plan) -> bool:
    return plan.layout.world == 1


# ---- batch ----


def mini_batches_are_equal(plan: Plan) -> bool:
    several_updates = plan.mini_share < plan.share
    return several_updates and plan.batch.mini_answers % plan.dp == 0


def mini_batch_by_micro_batch(plan: Plan) -> bool:
    return plan.mini_share < plan.share  # else one update: share_by_micro_batch


def dispatch_divides_the_answers(plan: Plan) -> str:
    faults = []
    for key, size in plan.batch.dispatch.items():
        if size and plan.batch.answers % size:
            faults.append(f"{key} {size}")
    if not faults:
        return ""
    return f"{plan.batch.answers} answers of an iteration cannot be divided by {', '.join(faults)}"


def dispatch_is_at_most_a_share(plan: Plan) -> str:
    faults = []
    ranks = {"actor_logprob": plan.dp, "ref": plan.dp, "actor_update": plan.dp}
    ranks["actor_rollout"] = max(plan.layout.infer_dp, 1)
    for name, count in ranks.items():
        size, share = plan.dispatch(name), plan.batch.answers // count
        if size > share:
            faults.append(
                f"{name}_dispatch_size {size} is above the {share} answers of each of {count} ranks"
            )
    return "; ".join(faults)


def rollout_share_by_dispatch(plan: Plan) -> str | None:
    size = plan.dispatch("actor_rollout")
    if not size:
        return None
    prompts = plan.batch.global_batch_size // max(plan.layout.infer_dp, 1)
    return indivisible(
        "answers of a vLLM replica",
        prompts * plan.batch.samples_per_prompt,
        f"actor_rollout_dispatch_size {size}",
        size,
    )


def whole_prompts_are_dispatched(plan: Plan) -> str | None:
    answers = plan.batch.samples_per_prompt
    for name in ("actor_rollout", "reward"):
        size = plan.dispatch(name)
        if size % answers:
            return (
                f"{name}_dispatch_size {size}: not a multiple of the {answers} answers of a prompt"
            )
    return None


def dynamic_batches_take_an_answer(plan: Plan) -> str:
    faults = []
    for name in ("update", "actor", "ref"):
        size = getattr(plan.batch, f"{name}_max_packing_token_size")
        if plan.batch.use_dynamic_bsz and size < plan.batch.seq_length:
            faults.append(
                f"{name}_max_packing_token_size {size} is below seq_length {plan.batch.seq_length}"
            )
    return "; ".join(faults)


def update_takes_a_mini_batch(plan: Plan) -> str | None:
    size, mini = plan.dispatch("actor_update"), plan.batch.mini_answers / plan.dp
    if 0 < size < mini:
        return (
            f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's "
            "mini-batch"
        )
    return None


def update_takes_every_answer(plan: Plan) -> str | None:
    size, share = plan.dispatch("actor_update"), plan.share
    if not 0 < size < share:
        return None
    by = f"actor_update_dispatch_size {size}"
    if plan.batch.guarantee_order:
        return (
            f"{by} with guarantee_order: only {size} of the {share} answers of each rank would be "
            "trained on"
        )
    return indivisible("answers of a training rank", share, by, size)


def removed_padding_varies_in_a_pipeline(plan: Plan) -> bool:
    in_a_pipeline = plan.batch.use_remove_padding and plan.layout.pp > 1
    return in_a_pipeline and not plan.batch.no_pad_to_seq_lengths
