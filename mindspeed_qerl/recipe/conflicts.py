"""Values of a config that exclude each other, whatever the engine."""

from collections.abc import Iterator

from mindspeed_qerl.common.errors import Fault, unknown
from mindspeed_qerl.recipe.keys import Values
from mindspeed_qerl.recipe.types import LOSS_MODES, Algorithm, Recipe

# keys of some loss modes only; one's own may read all
READ_BY = {
    "clip_ratio_c": ("vanilla", "gspo", "dppo_tv", "dppo_kl"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
}


def conflicts(recipe: Recipe, values: Values) -> Iterator[Fault]:
    """Faults of values that exclude each other."""
    batch = recipe.batch
    sampling = recipe.sampling
    evaluation = recipe.evaluation
    optimizer = recipe.optimizer
    task = recipe.task
    names = len(task.verifier_function)
    weights = len(task.verifier_weight)
    if names != weights or not names:
        yield _conflict(
            "rl_config.verifier_weight",
            f"rl_config: {names} verifier_function and {weights} verifier_weight must be lists, as "
            "long as each other, of at least one",
        )
    if task.chat_template_kwargs and task.prompt == "plain":
        yield _conflict(
            "task.chat_template_kwargs",
            f"task.chat_template_kwargs = {dict(task.chat_template_kwargs)} with task.prompt = "
            "'plain', which has no template: leave one of them out",
        )
    if sampling.longest > batch.max_model_len:
        yield _conflict(
            "generate_config.max_model_len",
            f"rl_config.max_prompt_length = {sampling.max_prompt_length} plus sampling max_tokens "
            f"= {sampling.max_tokens} exceeds generate_config.max_model_len = "
            f"{batch.max_model_len}",
        )
    if evaluation.temperature == 0 and evaluation.samples_per_problem > 1:
        yield _conflict(
            "eval.temperature",
            "eval.temperature = 0 (greedy) needs eval.samples_per_problem = 1, or be above 0",
        )
    if optimizer.min_lr > optimizer.lr:
        yield _conflict(
            "actor_config.min_lr",
            f"actor_config.lr = {optimizer.lr} must not be below actor_config.min_lr = "
            f"{optimizer.min_lr}",
        )
    yield from _algorithm_conflicts(recipe, values)
    if recipe.selection.overlong_buffer_enable:
        yield from _overlong_conflicts(recipe)
    if recipe.selection.filter_groups_enable:
        yield from _filter_conflicts(recipe)


def _conflict(key: str, message: str) -> Fault:
    return Fault("conflict", message, key)


def _algorithm_conflicts(recipe: Recipe, values: Values) -> Iterator[Fault]:
    algorithm = recipe.algorithm
    method = recipe.correction.method
    mode = algorithm.loss_mode
    if mode not in LOSS_MODES and ":" not in mode:
        sentence = unknown("loss", mode, LOSS_MODES)
        yield _conflict(
            "algorithm.loss_mode",
            f"algorithm.loss_mode: {sentence}. Your own is written module:function",
        )
    if method in ("sequence_tis", "sequence_mask") and mode == "cispo":
        yield _conflict(
            "rollout_correction.method",
            f"rollout_correction.method = {method!r} with algorithm.loss_mode = 'cispo': an "
            "answer's weight would undo CISPO's bound of each token's. Take token_tis",
        )
    if method in ("token_tis", "sequence_tis") and recipe.correction.floor:
        yield _conflict(
            "rollout_correction.floor",
            f"rollout_correction.floor is read by the masks and icepop, not by {method!r}: leave "
            "it out",
        )
    for name, modes in READ_BY.items():
        is_set = getattr(algorithm, name) != getattr(Algorithm(), name)
        if is_set and ":" not in mode and mode not in modes:
            yield _conflict(
                f"algorithm.{name}",
                f"algorithm.{name} is read with algorithm.loss_mode = {' or '.join(modes)}, not "
                f"{mode!r}: leave it out",
            )
    if algorithm.use_kl_in_reward and not algorithm.kl_coefficient:
        yield _conflict(
            "rl_config.use_kl_in_reward",
            "rl_config.use_kl_in_reward = true with rl_config.init_kl_coef = 0 takes nothing off "
            "the rewards: set init_kl_coef above 0, or use_kl_in_reward=false",
        )
    if values.get("rl_config.token_level_loss")[1] and algorithm.loss_agg_mode != "token-mean":
        yield _conflict(
            "algorithm.loss_agg_mode",
            "rl_config.token_level_loss = true with algorithm.loss_agg_mode = "
            f"{algorithm.loss_agg_mode!r}: leave one of them out; token_level_loss is token-mean",
        )


def _overlong_conflicts(recipe: Recipe) -> Iterator[Fault]:
    selection = recipe.selection
    max_tokens = recipe.sampling.max_tokens
    if not 1 <= selection.overlong_buffer <= max_tokens:
        yield _conflict(
            "rl_config.overlong_buffer",
            f"rl_config.overlong_buffer = {selection.overlong_buffer} with overlong_buffer_enable "
            f"must be between 1 and sampling max_tokens = {max_tokens}",
        )
    if selection.rollout_max_tokens != max_tokens:
        yield _conflict(
            "rl_config.rollout_max_tokens",
            f"rl_config.rollout_max_tokens = {selection.rollout_max_tokens} with "
            f"overlong_buffer_enable must be sampling max_tokens = {max_tokens}, or left out",
        )


def _filter_conflicts(recipe: Recipe) -> Iterator[Fault]:
    """Yields the conflicts of dynamic sampling."""
    selection = recipe.selection
    batch = recipe.batch
    task = recipe.task
    wanted = selection.filter_groups_train_batch_size
    batches = selection.filter_groups_max_batches
    key = "rl_config.filter_groups_train_batch_size"
    if 0 < batches * batch.global_batch_size < wanted:
        yield _conflict(
            key,
            f"{key} = {wanted} prompts cannot come from filter_groups_max_batches = {batches} "
            f"batches of megatron_training.global_batch_size = {batch.global_batch_size}",
        )
    if wanted % batch.mini_batch_size:
        yield _conflict(
            key,
            f"{key} = {wanted} prompts must be a multiple of rl_config.mini_batch_size = "
            f"{batch.mini_batch_size}",
        )
    metric = selection.filter_groups_metric
    if metric is not None and metric not in task.verifier_function:
        key = "rl_config.filter_groups_metric"
        sentence = unknown("verifier of verifier_function", metric, task.verifier_function)
        yield _conflict(key, f"{key}: {sentence}")
