"""How good answers are: accuracy with its interval, pass@k, maj@k, and how each answer was found.

One code for the evaluation inside a run and for tools/evaluate.py.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from mindspeed_qerl.recipe.types import Recipe

from .gsm8k.verifier import METHOD_OF_VERIFIER, RULES, extract_with_rule
from .math_answers import equal_answers
from .rewards import score
from .rows import Rows

Z_95 = 1.959964  # of the standard normal, two-sided


def evaluation_settings(recipe: Recipe) -> dict[str, Any]:
    """Returns how a run evaluates, by the names that summary.json of tools/evaluate.py has."""
    evaluation = recipe.evaluation
    quantization = recipe.quantization
    is_quantized = quantization.enabled and quantization.evaluation
    return {
        "verifier": recipe.task.verifier_function[0],
        "samples": evaluation.samples_per_problem if evaluation.temperature else 0,
        "temperature": evaluation.temperature,
        "max_tokens": recipe.sampling.max_tokens,
        "dtype": recipe.model.dtype,
        "prompt": recipe.task.prompt,
        "hardware_error": recipe.hardware_error.arguments("evaluation"),
        "quantization": quantization if is_quantized else None,
    }


def evaluate_answers(
    rows: Rows, texts: Sequence[str], truncated: Sequence[bool], n: int, verifier: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The score of `n` answers to each row, by the reward called `verifier`.

    Args:
        rows: of the task.
        texts: the answers, in the order of the rows.
        truncated: which were cut off at the length limit.

    Returns:
        Numbers: accuracy (the mean score; pass@1 where scores are 0 or 1), its standard_error over
        problems (NaN for one problem), interval_low and interval_high (95%, `interval`),
        n_problems, samples_per_problem, truncated_fraction; with n > 1 pass@n (the mean of each
        problem's best score), and for our own verifiers maj@n; for GSM8K's, which find a number in
        an answer, the share of each rule that found it (rule/..., rule/none without one);
        not_computed, if there are any: scores that could not be computed and count as 0, since an
        evaluation leaves out no answer.
        And per problem its question, answer, responses, for each response its score and whether it
        was truncated, for GSM8K's verifiers what was extracted and by which rule, and with `math`
        and n > 1 which responses are equal (`equal_answers`).

    Raises:
        ConfigError: an unknown verifier. RewardError: it failed.
    """
    row_of_text = [row for row in rows for _ in range(n)]
    computed = score([(verifier, 1.0)], texts, row_of_text)[0].reshape(-1, n)
    scores = np.nan_to_num(computed)
    per_problem = scores.mean(1)
    low, high = interval(scores)
    result = {
        "accuracy": per_problem.mean(),
        "standard_error": _standard_error(per_problem),
        "interval_low": low,
        "interval_high": high,
        "n_problems": len(rows),
        "samples_per_problem": n,
        "truncated_fraction": np.mean(truncated),
    }
    if missing := int(np.isnan(computed).sum()):
        result["not_computed"] = missing
    if n > 1:
        result[f"pass@{n}"] = scores.max(1).mean()
    answers = []
    for i, row in enumerate(rows):
        part = slice(i * n, (i + 1) * n)
        answers.append(
            {
                "question": row.question,
                "answer": row.answer,
                "responses": texts[part],
                "scores": scores[i].tolist(),
                "truncated": truncated[part],
            }
        )
    if verifier in METHOD_OF_VERIFIER:
        result |= _extraction(answers, METHOD_OF_VERIFIER[verifier])
    if verifier == "math" and n > 1:
        equal = equal_answers([answer["responses"] for answer in answers])
        for answer, numbers in zip(answers, equal):
            answer["equal_to"] = numbers
    votes = "equal_to" if verifier == "math" else "extracted"
    if n > 1 and votes in answers[0]:
        majorities = [majority_score(answer[votes], answer["scores"]) for answer in answers]
        result[f"maj@{n}"] = sum(majorities) / len(majorities)
    return result, answers


def _extraction(answers: list[dict[str, Any]], method: str) -> dict[str, float]:
    """Returns the share of each rule by which GSM8K's verifier reads the responses; what it reads
    is added to each of `answers`.
    """
    counts: Counter[str] = Counter()
    for answer in answers:
        extracted = [extract_with_rule(text, method) for text in answer["responses"]]
        answer["extracted"] = [number for number, _ in extracted]
        answer["rules"] = [rule for _, rule in extracted]
        counts.update(answer["rules"])
    return {f"rule/{rule}": counts[rule] / counts.total() for rule in RULES if counts[rule]}


def interval(scores: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of `scores` (problems, answers to each): `wilson_interval` where
    they are all 0 or 1; else the mean and 1.96 standard errors over problems to both sides, since
    the range of a reward is not known (NaN for one problem, or where all are alike).

    >>> interval(np.array([[0.0], [0.5], [1.0], [0.5]]))  # doctest: +ELLIPSIS
    (0.0999..., 0.9000...)
    """
    per_problem = scores.mean(1)
    if np.isin(scores, (0, 1)).all():
        return wilson_interval(per_problem, scores.shape[1])
    half = Z_95 * _standard_error(per_problem) or math.nan
    return float(per_problem.mean() - half), float(per_problem.mean() + half)


def _standard_error(per_problem: np.ndarray) -> float:
    return (
        per_problem.std(ddof=1) / math.sqrt(len(per_problem)) if len(per_problem) > 1 else math.nan
    )


def wilson_interval(per_problem: np.ndarray, n: int) -> tuple[float, float]:
    """95% interval of a mean accuracy over problems: Wilson's score interval (JASA 22, 1927), with
    the number of independent trials that gives the variance seen between problems.

    With one answer per problem these are the problems themselves. Several answers to one problem
    count as what they add: between once (they are always alike) and n times (as if they were other
    problems).

    Args:
        per_problem: the fraction of right answers of each problem, from `n` answers.
    """
    p = per_problem.mean()
    variance = per_problem.var()
    problems = len(per_problem)
    if variance > 0:
        trials = min(problems * p * (1 - p) / variance, problems * n)
    else:
        trials = problems * n if 0 < p < 1 else problems
    scale = 1 + Z_95**2 / trials
    centre = (p + Z_95**2 / (2 * trials)) / scale
    half = Z_95 * math.sqrt(p * (1 - p) / trials + Z_95**2 / (4 * trials**2)) / scale
    # of all right and all wrong, rounding puts an end beside 1 or 0
    return max(0.0, float(min(centre - half, p))), min(1.0, float(max(centre + half, p)))


def majority_score(extracted: Sequence[Hashable], scores: Sequence[float]) -> float:
    """Score of the answer most often extracted, of those that are not None (self-consistency, arXiv
    2203.11171); the mean over those that tie, 0 without any answer.
    """
    votes: Counter[Hashable] = Counter(extracted)
    del votes[None]
    most = max(votes.values(), default=0)
    winning = [score for answer, score in zip(extracted, scores) if votes[answer] == most]
    return sum(winning) / len(winning) if votes else 0.0
