"""Batch: prompts and answers of an iteration, mini-batches, dispatch sizes, padding."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rule import ENGINE, VALIDATION, WORKER, Rule, indivisible, multiple

BALANCING = "MindSpeed-RL mindspeed_rl/utils/seqlen_balancing.py"


def _dispatch_divides_the_answers(plan: Plan) -> str:
    faults = []
    for key, size in plan.batch.dispatch.items():
        if size and plan.batch.answers % size:
            faults.append(f"{key} {size}")
    if not faults:
        return ""
    return f"{plan.batch.answers} answers of an iteration cannot be divided by {', '.join(faults)}"


def _dispatch_is_at_most_a_share(plan: Plan) -> str:
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


def _rollout_share_by_dispatch(plan: Plan) -> str | None:
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


def _whole_prompts_are_dispatched(plan: Plan) -> str | None:
    answers = plan.batch.samples_per_prompt
    for name in ("actor_rollout", "reward"):
        size = plan.dispatch(name)
        if size % answers:
            return (
                f"{name}_dispatch_size {size}: not a multiple of the {answers} answers of a prompt"
            )
    return None


def _dynamic_batches_take_an_answer(plan: Plan) -> str:
    faults = []
    for name in ("update", "actor", "ref"):
        size = getattr(plan.batch, f"{name}_max_packing_token_size")
        if plan.batch.use_dynamic_bsz and size < plan.batch.seq_length:
            faults.append(
                f"{name}_max_packing_token_size {size} is below seq_length {plan.batch.seq_length}"
            )
    return "; ".join(faults)


def _update_takes_a_mini_batch(plan: Plan) -> str | None:
    size, mini = plan.dispatch("actor_update"), plan.batch.mini_answers / plan.dp
    if 0 < size < mini:
        return (
            f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's "
            "mini-batch"
        )
    return None


def _update_takes_every_answer(plan: Plan) -> str | None:
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


BATCH = (
    Rule(
        # global_batch_size is a multiple of training's data-parallel size.
        "batch_by_training_dp",
        f"{VALIDATION}:134",
        multiple("prompts of global_batch_size", "batch.global_batch_size", "dp"),
    ),
    Rule(
        # global_batch_size is a multiple of vLLM's replicas, world / infer TP.
        "batch_by_infer_dp",
        f"{VALIDATION}:158",
        multiple("prompts of global_batch_size", "batch.global_batch_size", "layout.infer_dp"),
    ),
    Rule(
        # global_batch_size is a multiple of the nodes: each has one process that scores answers.
        "batch_by_nodes",
        f"{VALIDATION}:281",
        multiple("prompts of global_batch_size", "batch.global_batch_size", "layout.nodes"),
    ),
    Rule(
        # A training rank's answers of an iteration are a multiple of micro_batch_size.
        "share_by_micro_batch",
        f"{VALIDATION}:139",
        multiple("answers of a training rank", "share", "batch.micro_batch_size"),
    ),
    Rule(
        # mini_batch_size x n_samples_per_prompt is a multiple of training's data-parallel size:
        # upstream rounds down, and the answers that are left make an update of their own.
        "mini_batch_by_training_dp",
        f"{WORKER}:166",
        multiple("answers of a mini-batch", "batch.mini_answers", "dp"),
    ),
    Rule(
        # A training rank's answers of an iteration are a multiple of its mini-batch: those left
        # over would make a small update of their own.
        "mini_batches_are_equal",
        f"{ENGINE}:515",
        lambda plan: (
            not plan.batch.mini_answers % plan.dp
            and plan.mini_share < plan.share  # else one update
            and multiple("answers of a training rank", "share", "mini_share")(plan)
        ),
    ),
    Rule(
        # A training rank's mini-batch is a multiple of micro_batch_size: a smaller last micro-batch
        # would weigh as much as a full one.
        "mini_batch_by_micro_batch",
        f"{ENGINE}:210",
        lambda plan: (
            plan.mini_share < plan.share  # else one update: share_by_micro_batch
            and multiple("answers of a rank's mini-batch", "mini_share", "batch.micro_batch_size")(
                plan
            )
        ),
    ),
    Rule(
        # Every dispatch size divides the answers of an iteration.
        "dispatch_divides_the_answers",
        f"{VALIDATION}:312",
        _dispatch_divides_the_answers,
    ),
    Rule(
        # A dispatch size is at most a rank's share of the answers: of vLLM's replicas for the
        # rollout, of training's ranks for the others.
        "dispatch_is_at_most_a_share",
        f"{VALIDATION}:377",
        _dispatch_is_at_most_a_share,
    ),
    Rule(
        # A vLLM replica's answers are a multiple of actor_rollout_dispatch_size.
        "rollout_share_by_dispatch",
        f"{VALIDATION}:192",
        _rollout_share_by_dispatch,
    ),
    Rule(
        # actor_rollout_dispatch_size and reward_dispatch_size are multiples of
        # n_samples_per_prompt: these two take whole prompts.
        "whole_prompts_are_dispatched",
        "MindSpeed-RL mindspeed_rl/trainer/utils/transfer_dock.py:436",
        _whole_prompts_are_dispatched,
    ),
    Rule(
        # actor_update_dispatch_size is at least a training rank's mini-batch.
        "update_takes_a_mini_batch",
        f"{VALIDATION}:367",
        _update_takes_a_mini_batch,
    ),
    Rule(
        # actor_update_dispatch_size is a training rank's whole share with guarantee_order, where
        # each rank is dealt that many answers once and the others are never trained on; without it,
        # it divides the share, or ranks would differ in their number of updates and wait for ever.
        "update_takes_every_answer",
        f"{WORKER}:306",
        _update_takes_every_answer,
    ),
    Rule(
        # use_remove_padding needs reset_attention_mask.
        "removed_padding_resets_the_mask",
        f"{VALIDATION}:70",
        lambda plan: (
            plan.batch.use_remove_padding
            and not plan.batch.reset_attention_mask
            and "use_remove_padding needs megatron_training.reset_attention_mask: true"
        ),
    ),
    Rule(
        # use_dynamic_bsz needs use_remove_padding: answers that are padded to the longest have more
        # tokens than were counted.
        "dynamic_batches_need_removed_padding",
        f"{BALANCING}:364",
        lambda plan: (
            plan.batch.use_dynamic_bsz
            and not plan.batch.use_remove_padding
            and "use_dynamic_bsz needs rl_config.use_remove_padding: true"
        ),
    ),
    Rule(
        # With use_dynamic_bsz, update_, actor_ and ref_max_packing_token_size are at least
        # seq_length: a longer answer would leave a micro-batch empty.
        "dynamic_batches_take_an_answer",
        f"{BALANCING}:323",
        _dynamic_batches_take_an_answer,
    ),
    Rule(
        # use_remove_padding with PP above 1 needs no_pad_to_seq_lengths.
        "removed_padding_varies_in_a_pipeline",
        f"{VALIDATION}:64",
        lambda plan: (
            plan.batch.use_remove_padding
            and plan.layout.pp > 1
            and not plan.batch.no_pad_to_seq_lengths
            and f"use_remove_padding with PP {plan.layout.pp} needs "
            "megatron_training.no_pad_to_seq_lengths: true"
        ),
    ),
)
