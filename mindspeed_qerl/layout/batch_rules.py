"""Batch: prompts and answers of an iteration, mini-batches, dispatch sizes, padding."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rule import ENGINE, VALIDATION, WORKER, Rule, indivisible
from mindspeed_qerl.recipe.types import Layout


def _batch_by(plan: Plan, by: str, ranks: int) -> str | None:
    return indivisible(
        "prompts of global_batch_size", plan.batch.global_batch_size, by, max(ranks, 1)
    )


def _dispatch_divides_the_answers(layout: Layout, plan: Plan) -> str | None:
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


def _dispatch_is_at_most_a_share(layout: Layout, plan: Plan) -> str:
    dp, wrong = layout.dp, []
    ranks_of = {
        "actor_rollout": layout.infer_dp,
        "actor_logprob": dp,
        "ref": dp,
        "actor_update": dp,
    }
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


def _rollout_share_by_dispatch(layout: Layout, plan: Plan) -> str | None:
    size = plan.batch.dispatch.get("actor_rollout_dispatch_size")
    share = plan.batch.global_batch_size // max(layout.infer_dp, 1) * plan.batch.samples_per_prompt
    return (
        indivisible("answers of a vLLM replica", share, "actor_rollout_dispatch_size {}", size)
        if size
        else None
    )


def _whole_prompts_are_dispatched(layout: Layout, plan: Plan) -> str | None:
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


def _update_takes_a_mini_batch(layout: Layout, plan: Plan) -> str | None:
    size, mini = (
        plan.batch.dispatch.get("actor_update_dispatch_size"),
        plan.batch.mini_answers / plan.dp,
    )
    if size and size < mini:
        return (
            f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's "
            "mini-batch"
        )
    return None


def _update_takes_every_answer(layout: Layout, plan: Plan) -> str | None:
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
        lambda layout, plan: _batch_by(
            plan,
            f"training DP {{}} = {layout.world} / (TP {layout.tp} x PP {layout.pp} x CP "
            f"{layout.cp})",
            layout.dp,
        ),
    ),
    Rule(
        "batch_by_infer_dp",
        f"{VALIDATION}:158",
        "global_batch_size is a multiple of vLLM's replicas, world / infer TP.",
        lambda layout, plan: _batch_by(
            plan,
            f"vLLM's {{}} replicas = {layout.world} / infer TP {layout.infer_tp}",
            layout.infer_dp,
        ),
    ),
    Rule(
        "batch_by_nodes",
        f"{VALIDATION}:281",
        "global_batch_size is a multiple of the nodes: each has one process that scores answers.",
        lambda layout, plan: _batch_by(plan, "{} nodes", layout.nodes),
    ),
    Rule(
        "share_by_micro_batch",
        f"{VALIDATION}:139",
        "A training rank's answers of an iteration are a multiple of micro_batch_size.",
        lambda layout, plan: indivisible(
            "answers of a training rank",
            plan.batch.global_batch_size // plan.dp * plan.batch.samples_per_prompt,
            "micro_batch_size {}",
            plan.batch.micro_batch_size,
        ),
    ),
    Rule(
        "mini_batch_by_training_dp",
        f"{WORKER}:166",
        "mini_batch_size x n_samples_per_prompt is a multiple of training's data-parallel size: "
        "upstream rounds down, and the answers that are left make an update of their own.",
        lambda layout, plan: indivisible(
            "answers of a mini-batch", plan.batch.mini_answers, "training DP {}", plan.dp
        ),
    ),
    Rule(
        "mini_batches_are_equal",
        f"{ENGINE}:515",
        "A training rank's answers of an iteration are a multiple of its "
        "mini-batch: those left over would make a small update of their own.",
        lambda layout, plan: (
            not plan.batch.mini_answers % plan.dp
            and plan.mini_share < plan.share  # else one update
            and indivisible(
                "answers of a training rank",
                plan.share,
                "the {} of its mini-batch",
                plan.mini_share,
            )
        ),
    ),
    Rule(
        "mini_batch_by_micro_batch",
        f"{ENGINE}:210",
        "A training rank's mini-batch is a multiple of "
        "micro_batch_size: a smaller last micro-batch would weigh as much as a full one.",
        lambda layout, plan: (
            plan.mini_share < plan.share  # else one update: share_by_micro_batch
            and indivisible(
                "answers of a rank's mini-batch",
                plan.mini_share,
                "micro_batch_size {}",
                plan.batch.micro_batch_size,
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
        lambda layout, plan: (
            plan.batch.use_remove_padding
            and not plan.batch.reset_attention_mask
            and "use_remove_padding needs megatron_training.reset_attention_mask: true"
        ),
    ),
    Rule(
        "removed_padding_varies_in_a_pipeline",
        f"{VALIDATION}:64",
        "use_remove_padding with PP above 1 needs no_pad_to_seq_lengths.",
        lambda layout, plan: (
            plan.batch.use_remove_padding
            and layout.pp > 1
            and not plan.batch.no_pad_to_seq_lengths
            and f"use_remove_padding with PP {layout.pp} needs "
            "megatron_training.no_pad_to_seq_lengths: true"
        ),
    ),
)
