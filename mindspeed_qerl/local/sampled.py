"""Sampled answers with their rewards, and the batch that is trained of them."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mindspeed_qerl.algorithm.advantages import group_advantages, rewards_less_kl
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.routes import Routers, routes_fault
from mindspeed_qerl.runs.checks import advantages_fault, ends_fault, impossible, tokens_fault

from .batch import Answer, TrainBatch, build_batch
from .processes import WorkerError


def answer_metrics(answers: Sequence[Answer]) -> dict[str, Any]:
    """Mean score of each verifier, mean length in tokens, and the share that was cut off."""
    metrics = {}
    for name in answers[0].scores:
        metrics[f"verifier/{name}/mean"] = np.nanmean([answer.scores[name] for answer in answers])
    lengths = [len(answer.token_ids) for answer in answers]
    metrics["response/length_mean"] = np.mean(lengths)
    metrics["response/length_max"] = np.max(lengths)
    metrics["response/truncated_fraction"] = np.mean([answer.is_truncated for answer in answers])
    return metrics


def check_answers(answers: Sequence[Answer], routers: Routers | None) -> None:
    """WorkerError that names the answer, where a log probability of the policy that sampled is no
    number, or above 0, or where its routes cannot be those of its prompt and its tokens. routers:
    those that were recorded, if any.
    """
    for answer in answers:
        words = f"the answer {answer.text[:200]!r} to {answer.question[:200]!r}"
        tokens = len(answer.token_ids)
        if routers:
            computed = len(answer.prompt) + tokens - 1  # not what follows the last one
            if fault := routes_fault(answer.routes, computed, routers):
                raise WorkerError(
                    f"{words}: {fault}. Nothing can be replayed (algorithm.routing_replay)"
                )
        logprobs = np.array(answer.logprobs, dtype=float)
        if len(logprobs) != tokens:
            raise WorkerError(
                f"vLLM gave {len(logprobs)} log probabilities for {tokens} of {words}"
            )
        wrong = logprobs[impossible(logprobs)]
        if len(wrong):
            raise WorkerError(f"vLLM gave {wrong[0]} as the log probability of a token of {words}")


def select(
    answers: Sequence[Answer], recipe: Recipe, logprobs_before: Callable[[TrainBatch], np.ndarray]
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns what is trained: `answers`, of whole groups, each with its advantage within its
    group; to a multiple of the mini-batch with answers that have no token to train, as those have
    none whose reward could not be computed. And metrics of the rewards.

    Args:
        logprobs_before: `LocalEngine.logprobs_before`, for KL in the reward: all tokens of an
            answer count there, also of one that is cut off and not trained.
    """
    algorithm = recipe.algorithm
    count = len(answers)
    batch = build_batch(answers).padded(-count % recipe.batch.mini_answers)
    rewards = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    metrics = {}
    if algorithm.use_kl_in_reward:
        logprobs = logprobs_before(batch)
        batch = replace(batch, old_logprobs=logprobs[0])
        old, reference = torch.from_numpy(logprobs[:, :count])
        mask = torch.from_numpy(batch.mask[:count])
        rewards, kl = rewards_less_kl(rewards, old, reference, mask, algorithm)
        metrics["reward/kl"] = float(kl)
    n = recipe.batch.samples_per_prompt
    batch.advantages[:count] = group_advantages(rewards, n, algorithm)
    batch.mask[:count][rewards.isnan().numpy()] = False
    if algorithm.mask_truncated_completions:
        batch.mask[:count][[answer.is_truncated for answer in answers]] = False
    return batch, metrics


def tokens_to_train(
    answers: Sequence[Answer], recipe: Recipe, batch: TrainBatch, ends: Collection[int]
) -> int:
    """Returns how many tokens of `answers` an epoch has to train, counted on the answers;
    WorkerError where `batch`, which `select` made of them, has others, or lacks the end of one.
    ends: ids of the end tokens.
    """
    finished = np.zeros(len(batch), dtype=bool)
    tokens = 0
    for row, answer in enumerate(answers):
        finished[row] = not answer.is_truncated
        is_kept = finished[row] or not recipe.algorithm.mask_truncated_completions
        if is_kept and not math.isnan(answer.reward):
            tokens += len(answer.token_ids)
    faults = (
        advantages_fault(batch.advantages[: len(answers)], recipe.batch.samples_per_prompt),
        tokens_fault(int(batch.mask.sum()), tokens, epochs=1),
        ends_fault(batch.tokens, batch.mask, finished, ends),
    )
    if fault := "\n".join(filter(None, faults)):
        raise WorkerError(fault)
    return tokens


def tokens_to_replay(batch: TrainBatch, recipe: Recipe) -> int:
    """Returns how many tokens an epoch over `batch` replays routes of: all but the last one of each
    row, of the mini-batches that have a token to train.
    """
    size = recipe.batch.mini_answers
    trained = batch.mask.any(1).reshape(-1, size).any(1).repeat(size)
    return int((batch.lengths - 1)[trained].sum())
