"""Sampled answers with their rewards, and the batch that is trained of them."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages
from mindspeed_qerl.algorithm.checks import advantages_fault, ends_fault, impossible, tokens_fault
from mindspeed_qerl.local.batch import Batch, build_batch
from mindspeed_qerl.local.processes import WorkerError
from mindspeed_qerl.local.rollout import Completion
from mindspeed_qerl.recipe.types import Recipe
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
        return Sampled(self.rows + other.rows, self.prompts + other.prompts, self.answers + other.answers,
                       self.texts + other.texts, np.concatenate([self.rewards, other.rewards]),
                       {name: np.concatenate([scores, other.scores[name]]) for name, scores in self.scores.items()})


def check_logprobs(sampled: Sampled) -> None:
    """WorkerError that names the answer, where a log probability of the policy that sampled is no number, or above
    0."""
    for row, answer, text in zip(sampled.rows, sampled.answers, sampled.texts):
        logprobs = np.array(answer.logprobs, dtype=float)
        wrong = logprobs[impossible(logprobs)]
        if len(wrong) or len(logprobs) != len(answer.token_ids):
            given = f"{wrong[0]} as a log probability" if len(wrong) else f"{len(logprobs)} log probabilities"
            raise WorkerError(f"vLLM gave {given} for the {len(answer.token_ids)} tokens of the answer {text[:200]!r} "
                              f"to {row.question[:200]!r}: nothing can be trained on it")


def select(sampled: Sampled, kept: np.ndarray, recipe: Recipe) -> Batch:
    """What is trained: the answers of the groups `kept`, each with its advantage within its group; to a multiple of
    the mini-batch with answers that have no token to train.

    Args:
        kept: numbers of groups, at most as many as are trained in a step.
    """
    n, algorithm, rows = recipe.batch.samples_per_prompt, recipe.algorithm, rows_of(kept, recipe)
    advantages = group_advantages(torch.from_numpy(sampled.rewards[rows]), n, algorithm.adv_estimator,
                                  algorithm.norm_adv_by_std_in_grpo).numpy()
    answers = [sampled.answers[row] for row in rows]
    batch = build_batch([sampled.prompts[row] for row in rows], [answer.token_ids for answer in answers],
                        [answer.logprobs for answer in answers], advantages)
    if algorithm.mask_truncated_completions:
        batch.mask[[answer.truncated for answer in answers]] = False
    return batch.padded(-len(batch) % recipe.batch.mini_answers)


def rows_of(groups: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Numbers of the answers of `groups`."""
    n = recipe.batch.samples_per_prompt
    return (groups[:, None] * n + np.arange(n)).reshape(-1)


def tokens_to_train(sampled: Sampled, kept: np.ndarray, recipe: Recipe, batch: Batch, ends: Collection[int]) -> int:
    """How many tokens of the groups `kept` an epoch has to train, counted on the answers; WorkerError where `batch`,
    which `select` made of them, has others, or lacks the end of one. ends: ids of the end tokens."""
    answers = [sampled.answers[row] for row in rows_of(kept, recipe)]
    left_out = recipe.algorithm.mask_truncated_completions
    tokens = sum(len(answer.token_ids) for answer in answers if not (left_out and answer.truncated))
    finished = np.zeros(len(batch), dtype=bool)
    finished[: len(answers)] = [not answer.truncated for answer in answers]
    faults = (advantages_fault(batch.advantages[: len(answers)], recipe.batch.samples_per_prompt),
              tokens_fault(int(batch.mask.sum()), tokens, epochs=1),
              ends_fault(batch.tokens, batch.mask, finished, ends))
    if fault := "\n".join(filter(None, faults)):
        raise WorkerError(fault)
    return tokens
