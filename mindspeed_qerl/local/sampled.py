"""Sampled answers with their rewards, and the batch that is trained of them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages, rewards_less_kl
from mindspeed_qerl.algorithm.metrics import Metric
from mindspeed_qerl.local.batch import Batch, build_batch
from mindspeed_qerl.local.processes import WorkerError
from mindspeed_qerl.local.serving import Completion
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.routes import Routers, routes_fault
from mindspeed_qerl.runs.checks import advantages_fault, ends_fault, impossible, tokens_fault
from mindspeed_qerl.tasks.rows import Row


@dataclass(frozen=True)
class Sampled:
    """Answers to prompts, those to one prompt side by side; one of each for every answer."""

    rows: list[Row]
    prompts: list[list[int]]
    answers: list[Completion]
    texts: list[str]
    rewards: np.ndarray  # float64 [N], of length, too
    scores: dict[str, np.ndarray]  # of each verifier, float64 [N]

    def __add__(self, other: "Sampled") -> "Sampled":
        return Sampled(
            self.rows + other.rows,
            self.prompts + other.prompts,
            self.answers + other.answers,
            self.texts + other.texts,
            np.r_[self.rewards, other.rewards],
            {name: np.r_[scores, other.scores[name]] for name, scores in self.scores.items()},
        )


def answer_metrics(sampled: Sampled) -> dict[str, float]:
    """Mean score of each verifier, mean length in tokens, and the share that was cut off."""
    means = {f"verifier/{name}/mean": scores.mean() for name, scores in sampled.scores.items()}
    return means | {
        "response/length_mean": np.mean([len(answer.token_ids) for answer in sampled.answers]),
        "response/truncated_fraction": np.mean([answer.truncated for answer in sampled.answers]),
    }


def check_answers(sampled: Sampled, routers: Routers | None) -> None:
    """WorkerError that names the answer, where a log probability of the policy that sampled is no
    number, or above 0, or where its routes cannot be those of its prompt and its tokens. routers:
    those that were recorded, if any.
    """
    for row, prompt, answer, text in zip(
        sampled.rows, sampled.prompts, sampled.answers, sampled.texts
    ):
        words = f"the answer {text[:200]!r} to {row.question[:200]!r}"
        if routers:
            computed = len(prompt) + len(answer.token_ids) - 1  # not what follows the last one
            if fault := routes_fault(answer.routes, computed, routers):
                raise WorkerError(
                    f"{words}: {fault}. Nothing can be replayed (algorithm.routing_replay)"
                )
        logprobs, tokens = np.array(answer.logprobs, dtype=float), len(answer.token_ids)
        if len(logprobs) != tokens:
            raise WorkerError(
                f"vLLM gave {len(logprobs)} log probabilities for {tokens} of {words}"
            )
        wrong = logprobs[impossible(logprobs)]
        if len(wrong):
            raise WorkerError(f"vLLM gave {wrong[0]} as the log probability of a token of {words}")


def select(
    sampled: Sampled,
    kept: np.ndarray,
    recipe: Recipe,
    logprobs_before: Callable[[Batch], tuple[np.ndarray, np.ndarray]] | None = None,
) -> tuple[Batch, dict[str, float]]:
    """What is trained: the answers of the groups `kept`, each with its advantage within its group;
    to a multiple of the mini-batch with answers that have no token to train. And metrics of the
    rewards.

    Args:
        kept: numbers of groups, at most as many as are trained in a step.
        logprobs_before: `LocalEngine.logprobs_before`, for KL in the reward: all tokens of an
            answer count there, also of one that is cut off and not trained.
    """
    algorithm, rows = recipe.algorithm, rows_of(kept, recipe)
    answers = [sampled.answers[row] for row in rows]
    missing = -len(rows) % recipe.batch.mini_answers
    batch = build_batch(
        [sampled.prompts[row] for row in rows],
        [answer.token_ids for answer in answers],
        [answer.logprobs for answer in answers],
        np.zeros(len(rows)),
        [answer.routes for answer in answers] if algorithm.routing_replay == "rollout" else None,
    )
    rewards = torch.from_numpy(sampled.rewards[rows])
    metrics: dict[str, Metric] = {}
    if algorithm.use_kl_in_reward:
        assert logprobs_before, "KL needs it"
        old, reference = logprobs_before(batch.padded(missing))
        old, reference = old[: len(rows)], reference[: len(rows)]
        batch = replace(batch, old_logprobs=old)
        rewards, metrics = rewards_less_kl(
            rewards,
            torch.from_numpy(old),
            torch.from_numpy(reference),
            torch.from_numpy(batch.mask),
            algorithm,
        )
        for row in rows[~np.isfinite(rewards.numpy())]:
            answer, question = sampled.texts[row][:200], sampled.rows[row].question[:200]
            raise WorkerError(
                f"the KL of the answer {answer!r} to {question!r} is no finite number, and with "
                "rl_config.use_kl_in_reward its reward neither"
            )
    batch.advantages[:] = group_advantages(
        rewards,
        recipe.batch.samples_per_prompt,
        algorithm.adv_estimator,
        algorithm.norm_adv_by_std_in_grpo,
    )
    if algorithm.mask_truncated_completions:
        batch.mask[[answer.truncated for answer in answers]] = False
    return batch.padded(missing), {name: metric.value() for name, metric in metrics.items()}


def rows_of(groups: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Numbers of the answers of `groups`."""
    n = recipe.batch.samples_per_prompt
    return (groups[:, None] * n + np.arange(n)).reshape(-1)


def tokens_to_train(
    sampled: Sampled, kept: np.ndarray, recipe: Recipe, batch: Batch, ends: Collection[int]
) -> int:
    """How many tokens of the groups `kept` an epoch has to train, counted on the answers;
    WorkerError where `batch`, which `select` made of them, has others, or lacks the end of one.
    ends: ids of the end tokens.
    """
    answers = [sampled.answers[row] for row in rows_of(kept, recipe)]
    finished = np.zeros(len(batch), dtype=bool)
    finished[: len(answers)] = [not answer.truncated for answer in answers]
    if recipe.algorithm.mask_truncated_completions:
        answers = [answer for answer in answers if not answer.truncated]
    tokens = sum(len(answer.token_ids) for answer in answers)
    group_size = recipe.batch.samples_per_prompt
    faults = (
        advantages_fault(batch.advantages[: len(kept) * group_size], group_size),
        tokens_fault(int(batch.mask.sum()), tokens, epochs=1),
        ends_fault(batch.tokens, batch.mask, finished, ends),
    )
    if fault := "\n".join(filter(None, faults)):
        raise WorkerError(fault)
    return tokens


def tokens_to_replay(batch: Batch, recipe: Recipe) -> int:
    """How many tokens an epoch over `batch` replays routes of: all but the last one of each row, of
    the mini-batches that have a token to train.
    """
    size = recipe.batch.mini_answers
    trained = batch.mask.any(1).reshape(-1, size).any(1).repeat(size)
    return int((batch.lengths - 1)[trained].sum())
