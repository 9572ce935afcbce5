"""What upstream demands of a batch, a rule a row: how a plan's answers are dealt to ranks."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rule import Broken, Rule, indivisible, multiple

PROMPTS = ("prompts of global_batch_size", "batch.global_batch_size")


def dispatch_divides_the_answers(plan: Plan) -> Broken:
    sizes = plan.batch.dispatch.items()
    answers = plan.batch.answers
    faults = [f"{key} {size}" for key, size in sizes if size and answers % size]
    return bool(faults) and (
        f"{answers} answers of an iteration cannot be divided by {', '.join(faults)}"
    )


def dispatch_is_at_most_a_share(plan: Plan) -> Broken:
    """A share is of vLLM's replicas for the rollout, of training's ranks for the others."""
    faults = []
    for name in ("actor_logprob", "ref", "actor_update", "actor_rollout"):
        count = max(plan.layout.infer_dp, 1) if name == "actor_rollout" else plan.dp
        size = plan.dispatch(name)
        share = plan.batch.answers // count
        if size > share:
            faults.append(
                f"{name}_dispatch_size {size} is above the {share} answers of each of {count} ranks"
            )
    return "; ".join(faults)


def rollout_share_by_dispatch(plan: Plan) -> Broken:
    size = plan.dispatch("actor_rollout")
    what = "answers of a vLLM replica"
    prompts = plan.batch.global_batch_size // max(plan.layout.infer_dp, 1)
    share = prompts * plan.batch.samples_per_prompt
    by = f"actor_rollout_dispatch_size {size}"
    return size > 0 and indivisible(what, share, by, size)


def whole_prompts_are_dispatched(plan: Plan) -> Broken:
    answers = plan.batch.samples_per_prompt
    for name in ("actor_rollout", "reward"):
        size = plan.dispatch(name)
        if size % answers:
            return (
                f"{name}_dispatch_size {size}: not a multiple of the {answers} answers of a prompt"
            )
    return None


def update_takes_a_mini_batch(plan: Plan) -> Broken:
    size = plan.dispatch("actor_update")
    mini = plan.batch.mini_answers / plan.dp
    return 0 < size < mini and (
        f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's mini-batch"
    )


def update_takes_every_answer(plan: Plan) -> Broken:
    """With guarantee_order each rank is dealt that many answers once; without, ranks would differ
    in their number of updates, and wait for ever.
    """
    size = plan.dispatch("actor_update")
    share = plan.share
    if not 0 < size < share:
        return None
    by = f"actor_update_dispatch_size {size}"
    if plan.batch.guarantee_order:
        return (
            f"{by} with guarantee_order: only {size} of the {share} answers of each rank would be "
            "trained on"
        )
    return indivisible("answers of a training rank", share, by, size)


def dynamic_batches_take_an_answer(plan: Plan) -> Broken:
    """A longer answer would leave a micro-batch empty."""
    batch = plan.batch
    faults = []
    for name in ("update", "actor", "ref"):
        size = getattr(batch, f"{name}_max_packing_token_size")
        if size < batch.seq_length:
            faults.append(
                f"{name}_max_packing_token_size {size} is below seq_length {batch.seq_length}"
            )
    return batch.use_dynamic_bsz and "; ".join(faults)


BATCH = [
    Rule(
        "batch_by_training_dp",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:134",
        multiple(*PROMPTS, "dp"),
    ),
    Rule(
        "batch_by_infer_dp",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:158",
        multiple(*PROMPTS, "layout.infer_dp"),
    ),
    Rule(  # each has one process that scores answers
        "batch_by_nodes",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:281",
        multiple(*PROMPTS, "layout.nodes"),
    ),
    Rule(
        "share_by_micro_batch",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:139",
        multiple("answers of a training rank", "share", "batch.micro_batch_size"),
    ),
    Rule(  # upstream rounds down, and the answers that are left make an update of their own
        "mini_batch_by_training_dp",
        "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py:166",
        multiple("answers of a mini-batch", "batch.mini_answers", "dp"),
    ),
    Rule(  # those left over would make a small update of their own
        "mini_batches_are_equal",
        "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py:515",
        multiple(
            "answers of a training rank",
            "share",
            "mini_share",
            when=lambda plan: (
                plan.mini_share < plan.share and plan.batch.mini_answers % plan.dp == 0
            ),
        ),
    ),
    Rule(  # a smaller last one would weigh as much as a full one; of one update: share_by_micro_batch
        "mini_batch_by_micro_batch",
        "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py:210",
        multiple(
            "answers of a rank's mini-batch",
            "mini_share",
            "batch.micro_batch_size",
            when=lambda plan: plan.mini_share < plan.share,
        ),
    ),
    Rule(
        "dispatch_divides_the_answers",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:312",
        dispatch_divides_the_answers,
    ),
    Rule(
        "dispatch_is_at_most_a_share",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:377",
        dispatch_is_at_most_a_share,
    ),
    Rule(
        "rollout_share_by_dispatch",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:192",
        rollout_share_by_dispatch,
    ),
    Rule(
        "whole_prompts_are_dispatched",
        "MindSpeed-RL mindspeed_rl/trainer/utils/transfer_dock.py:436",
        whole_prompts_are_dispatched,
    ),
    Rule(
        "update_takes_a_mini_batch",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:367",
        update_takes_a_mini_batch,
    ),
    Rule(
        "update_takes_every_answer",
        "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py:306",
        update_takes_every_answer,
    ),
    Rule(
        "removed_padding_resets_the_mask",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:70",
        lambda plan: (
            plan.batch.use_remove_padding
            and not plan.batch.reset_attention_mask
            and "use_remove_padding needs megatron_training.reset_attention_mask: true"
        ),
    ),
    Rule(  # answers that are padded to the longest have more tokens than were counted
        "dynamic_batches_need_removed_padding",
        "MindSpeed-RL mindspeed_rl/utils/seqlen_balancing.py:364",
        lambda plan: (
            plan.batch.use_dynamic_bsz
            and not plan.batch.use_remove_padding
            and "use_dynamic_bsz needs rl_config.use_remove_padding: true"
        ),
    ),
    Rule(
        "dynamic_batches_take_an_answer",
        "MindSpeed-RL mindspeed_rl/utils/seqlen_balancing.py:323",
        dynamic_batches_take_an_answer,
    ),
    Rule(
        "removed_padding_varies_in_a_pipeline",
        "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py:64",
        lambda plan: (
            plan.batch.use_remove_padding
            and plan.layout.pp > 1
            and not plan.batch.no_pad_to_seq_lengths
            and f"use_remove_padding with PP {plan.layout.pp} needs "
            "megatron_training.no_pad_to_seq_lengths: true"
        ),
    ),
]
