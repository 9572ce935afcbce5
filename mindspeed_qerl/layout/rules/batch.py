"""Rules of the batch: prompts and answers of an iteration, mini-batches, dispatch sizes, padding."""

from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules.rule import indivisible, rule

VALIDATION = "MindSpeed-RL mindspeed_rl/config_cls/validate_config.py"
WORKER = "MindSpeed-RL mindspeed_rl/workers/actor_hybrid_worker.py"
ENGINE = "MindSpeed-RL mindspeed_rl/models/base/base_training_engine.py"


@rule("global_batch_size is a multiple of training's data-parallel size.", VALIDATION, 134,
      "if global_batch_size % data_parallel != 0:")
def batch_by_training_dp(plan: Plan) -> str | None:
    layout = plan.layout
    by = f"training DP {{}} = {layout.world} / (TP {layout.tp} x PP {layout.pp} x CP {layout.cp})"
    return indivisible("prompts of global_batch_size", plan.batch.global_batch_size, by, max(layout.dp, 1))


@rule("global_batch_size is a multiple of vLLM's replicas, world / infer TP.", VALIDATION, 158,
      "generate_config.data_parallel_size = rl_config.actor_resource.num_npus // (")
def batch_by_infer_dp(plan: Plan) -> str | None:
    layout = plan.layout
    by = f"vLLM's {{}} replicas = {layout.world} / infer TP {layout.infer_tp}"
    return indivisible("prompts of global_batch_size", plan.batch.global_batch_size, by, max(layout.infer_dp, 1))


@rule("global_batch_size is a multiple of the nodes: each has one process that scores answers.", VALIDATION, 281,
      "if reward_config.global_batch_size % rule_reward_num_process != 0:")
def batch_by_nodes(plan: Plan) -> str | None:
    return indivisible("prompts of global_batch_size", plan.batch.global_batch_size, "{} nodes", plan.layout.nodes)


@rule("A training rank's answers of an iteration are a multiple of micro_batch_size.", VALIDATION, 139,
      "if (global_batch_size // data_parallel * n_samples) % micro_batch_size != 0:")
def share_by_micro_batch(plan: Plan) -> str | None:
    share = plan.batch.global_batch_size // max(plan.layout.dp, 1) * plan.batch.samples_per_prompt
    return indivisible("answers of a training rank", share, "micro_batch_size {}", plan.batch.micro_batch_size)


@rule("mini_batch_size x n_samples_per_prompt is a multiple of training's data-parallel size: upstream rounds down, "
      "and the answers that are left make an update of their own.", WORKER, 166,
      "// self.parallel_state.get_data_parallel_world_size(),")
def mini_batch_by_training_dp(plan: Plan) -> str | None:
    return indivisible("answers of a mini-batch", plan.batch.mini_answers, "training DP {}", max(plan.layout.dp, 1))


@rule("A training rank's answers of an iteration are a multiple of its mini-batch: those left over would make a small "
      "update of their own.", ENGINE, 515,
      "mini_batches = self._split_batches(data, batch_size=self.mini_batch_size_per_dp,")
def mini_batches_are_equal(plan: Plan) -> str | None:
    dp = max(plan.layout.dp, 1)
    share, mini = plan.batch.answers // dp, plan.batch.mini_answers // dp
    if plan.batch.mini_answers % dp or mini >= share:
        return None  # another rule's case; all answers in one update
    return indivisible("answers of a training rank", share, "the {} of its mini-batch", mini)


@rule("A training rank's mini-batch is a multiple of micro_batch_size: a smaller last micro-batch would weigh as much "
      "as a full one.", ENGINE, 210, "batches = self._split_batches(batch, batch_size=self.micro_batch_size,")
def mini_batch_by_micro_batch(plan: Plan) -> str | None:
    dp = max(plan.layout.dp, 1)
    mini = plan.batch.mini_answers // dp
    if mini >= plan.batch.answers // dp:
        return None  # all answers in one update, whose size is share_by_micro_batch's
    return indivisible("answers of a rank's mini-batch", mini, "micro_batch_size {}", plan.batch.micro_batch_size)


@rule("Every dispatch size divides the answers of an iteration.", VALIDATION, 312,
      "if global_batch * rl_config.n_samples_per_prompt % experience_count != 0:")
def dispatch_divides_the_answers(plan: Plan) -> str | None:
    wrong = [f"{key} {size}" for key, size in plan.batch.dispatch.items() if size and plan.batch.answers % size]
    return f"{plan.batch.answers} answers of an iteration cannot be divided by {' or '.join(wrong)}" if wrong else None


@rule("A dispatch size is at most a rank's share of the answers: of vLLM's replicas for the rollout, of training's "
      "ranks for the others.", VALIDATION, 377,
      "if dispatch_size and dispatch_size > (global_batch_size * n_samples_per_prompt // data_parallel_size):")
def dispatch_is_at_most_a_share(plan: Plan) -> str | None:
    dp, wrong = plan.layout.dp, []
    ranks_of = {"actor_rollout": plan.layout.infer_dp, "actor_logprob": dp, "ref": dp, "actor_update": dp}
    for name, ranks in ranks_of.items():
        size, share = plan.batch.dispatch.get(f"{name}_dispatch_size"), plan.batch.answers // max(ranks, 1)
        if size and size > share:
            wrong.append(f"{name}_dispatch_size {size} is above the {share} answers of each of {ranks} ranks")
    return "; ".join(wrong) or None


@rule("A vLLM replica's answers are a multiple of actor_rollout_dispatch_size.", VALIDATION, 192,
      "rl_config.actor_rollout_dispatch_size,")
def rollout_share_by_dispatch(plan: Plan) -> str | None:
    size = plan.batch.dispatch.get("actor_rollout_dispatch_size")
    if not size:
        return None
    share = plan.batch.global_batch_size // max(plan.layout.infer_dp, 1) * plan.batch.samples_per_prompt
    return indivisible("answers of a vLLM replica", share, "actor_rollout_dispatch_size {}", size)


@rule("actor_rollout_dispatch_size and reward_dispatch_size are multiples of n_samples_per_prompt: these two take "
      "whole prompts.", "MindSpeed-RL mindspeed_rl/trainer/utils/transfer_dock.py", 436,
      "if experience_count % self.n_samples_per_prompt != 0:")
def whole_prompts_are_dispatched(plan: Plan) -> str | None:
    answers = plan.batch.samples_per_prompt
    wrong = [f"{key} {size}" for key in ("actor_rollout_dispatch_size", "reward_dispatch_size")
             if (size := plan.batch.dispatch.get(key)) and size % answers]
    return f"{' and '.join(wrong)}: not a multiple of the {answers} answers of a prompt" if wrong else None


@rule("actor_update_dispatch_size is at least a training rank's mini-batch.", VALIDATION, 367,
      "if rl_config.actor_update_dispatch_size < rl_config.mini_batch_size / actor_data_parallel_size:")
def update_takes_a_mini_batch(plan: Plan) -> str | None:
    size, dp = plan.batch.dispatch.get("actor_update_dispatch_size"), max(plan.layout.dp, 1)
    mini = plan.batch.mini_answers / dp
    if size and size < mini:
        return f"actor_update_dispatch_size {size} is below the {mini:g} answers of a rank's mini-batch"
    return None


@rule("actor_update_dispatch_size is a training rank's whole share with guarantee_order, where each rank is dealt "
      "that many answers once and the others are never trained on; without it, it divides the share, or ranks would "
      "differ in their number of updates and wait for ever.", WORKER, 306, "assign_batch_size=experience_count")
def update_takes_every_answer(plan: Plan) -> str | None:
    size, share = plan.batch.dispatch.get("actor_update_dispatch_size"), plan.batch.answers // max(plan.layout.dp, 1)
    if not size or size >= share:
        return None
    if plan.batch.guarantee_order:
        return (f"actor_update_dispatch_size {size} with guarantee_order: only {size} of the {share} answers of each "
                "rank would be trained on")
    return indivisible("answers of a training rank", share, "actor_update_dispatch_size {}", size)


@rule("use_remove_padding needs reset_attention_mask.", VALIDATION, 70, "if not actor_config.reset_attention_mask:")
def removed_padding_resets_the_mask(plan: Plan) -> str | None:
    if plan.batch.use_remove_padding and not plan.batch.reset_attention_mask:
        return "use_remove_padding needs megatron_training.reset_attention_mask: true"
    return None


@rule("use_remove_padding with PP above 1 needs no_pad_to_seq_lengths.", VALIDATION, 64,
      "if actor_config.pipeline_model_parallel_size > 1 and not actor_config.no_pad_to_seq_lengths:")
def removed_padding_varies_in_a_pipeline(plan: Plan) -> str | None:
    if plan.batch.use_remove_padding and plan.layout.pp > 1 and not plan.batch.no_pad_to_seq_lengths:
        return f"use_remove_padding with PP {plan.layout.pp} needs megatron_training.no_pad_to_seq_lengths: true"
    return None
