"""What upstream demands of a batch, a rule a row: how a plan's answers are dealt to ranks."""

from .plan import Plan
from .rule import Broken, Rule, multiple

PROMPTS = ("prompts of global_batch_size", "batch.global_batch_size")
by_mini_batch = multiple("answers of a training rank", "share", "mini_share")
mini_batch_by_micro_batch = multiple(
    "answers of a rank's mini-batch", "mini_share", "batch.micro_batch_size"
)


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
        lambda plan: plan.batch.mini_answers % plan.dp == 0 and by_mini_batch(plan),
    ),
    Rule(  # a smaller last one would weigh as much as a full one; of one update: share_by_micro_batch
        "mini_batch_by_micro_batch",
        "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py:210",
        lambda plan: plan.mini_share < plan.share and mini_batch_by_micro_batch(plan),
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
