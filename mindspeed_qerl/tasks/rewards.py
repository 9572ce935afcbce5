"""What an answer is worth: the rewards by name, a user's own by import path, and what they return,
checked.

A reward is called as `f(responses, answers, rows)`: the decoded answers of the model, the `answer`
of each one's row, and that row with all its columns. It returns a number for each; None where it
could not be computed, which is no 0: the answer leaves the update and is counted. docs/own_task.md
shows one. Rewards written for TRL, ms-swift and verl are known by their parameters (`_form_of`) and
called as their authors mean them.
"""

import asyncio
import copy
import inspect
import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.imports import load

from . import math_answers
from .gsm8k import verifier as gsm8k
from .rows import Columns, Row, Rows

Reward = Callable[..., Any]
Texts = Sequence[str]
ByReward = dict[str, np.ndarray]  # by the name of the reward
Verifiers = Sequence[tuple[str, float]]  # (name, weight) of each
VERIFIERS: dict[str, Reward] = {**gsm8k.VERIFIERS, "math": math_answers.score_batch}
# Other libraries' forms: the parameter that each is known by, and what else it is given besides the
# columns of the rows.
FORMS = {
    "completions": ("trl", ("prompts",)),
    "solution_str": ("verl", ("ground_truth", "extra_info")),
    "solution_strs": ("verl, batched", ("ground_truths", "extra_infos")),
}
# For a None: the row is left to other rewards; this one could not be computed.
NONE = {"trl": math.nan, "ours": math.inf}
# Parameters of forms that are not known: such a reward is not called by position.
FOREIGN = {"completion", "completion_ids", "data_source"}
# What a reward of our form is called with, and words in the names of its parameters that say so.
PLACES = {
    "responses": "response completion output prediction predicted generated text reply",
    "answers": "answer gold truth label target reference expected",
    "rows": "row column record example metadata meta extra info",
}
NO_PLACE = "prompt question query instruction problem input message"


class RewardError(ConfigError):
    """A reward raised, or did not return a finite number for each response."""


def load_reward(name: str) -> Reward:
    """The reward called `name`: a name of `VERIFIERS`, or "module:function", which may be in the
    current folder. ConfigError says what is wrong with the name, the module or the function, and
    what is nearest to it.
    """
    return load(name, VERIFIERS, "verifier", "rl_config.verifier_function")


def score(verifiers: Verifiers, responses: Texts, rows: Rows) -> tuple[np.ndarray, ByReward]:
    """The weighted sum of several rewards.

    Args:
        verifiers: (name, weight) of each. responses, rows: N decoded answers, and the row that each
            of them answers.

    Returns:
        float64 [N] of weight times reward, summed; and by name the rewards themselves, float64 [N].
        NaN where one could not be computed.

    Raises:
        ConfigError: there is no such reward. RewardError: one did not do its work.

    >>> from mindspeed_qerl.tasks.rows import row_of
    >>> row = row_of({"prompt": "2+2?", "answer": "4"})
    >>> score([("gsm8k", 1.0), ("gsm8k_strict", 0.5)], ["it is 4", "#### 4"], [row, row])[0]
    array([1. , 1.5])
    """
    scores = {name: call_reward(name, load_reward(name), responses, rows) for name, _ in verifiers}
    return _weighted(verifiers, scores, responses, rows), scores


def _weighted(verifiers: Verifiers, scores: ByReward, responses: Texts, rows: Rows) -> np.ndarray:
    """The sum of weight times score; in `scores` a reward that leaves a row to others becomes 0,
    and one that could not be computed NaN.
    """
    skipped = np.isnan([*scores.values()]).all(axis=0)
    if skipped.any():
        index = int(skipped.argmax())
        raise RewardError(
            f"verifier {', '.join(scores)}: None, and so no reward at all, for "
            f"{_described(responses[index], rows[index])}"
        )
    total = np.zeros(len(responses))
    for name, weight in verifiers:
        scores[name] = np.nan_to_num(scores[name], posinf=math.nan)
        total += weight * scores[name]
    return total


def try_rewards(verifiers: Verifiers, rows: Rows) -> list[str]:
    """Call the rewards on the first and the last row, before anything heavy starts: with a row's
    answer as response, and with an empty one. All rows are looked through for the columns that they
    take.

    Returns:
        A warning for each reward of a user's own that gives no answer more than the empty one.
    """
    ends = [rows[0], rows[-1]]
    tried = ends * 2
    responses = [*(row.answer for row in ends), "", ""]
    scores = {}
    warnings = []
    for name, _ in verifiers:
        reward = load_reward(name)
        form, parameters = _form_of(name, reward, rows)
        scores[name] = call_reward(name, reward, responses, tried)
        gold, empty = scores[name].reshape(2, 2)
        if name not in VERIFIERS and (gold <= empty).all():
            passed = _arguments(reward, form, parameters, responses[:1], tried[:1])
            warnings.append(
                f"verifier {name!r} gives the gold answer {gold[0]:g} and an empty one "
                f"{empty[0]:g} ({rows[0].where}): fine if it judges something else, such as the "
                f"form. It was passed {', '.join(f'{key}={value!r:.80}' for key, value in passed.items())}"
            )
    _weighted(verifiers, scores, responses, tried)
    return warnings


def call_reward(name: str, reward: Reward, responses: Texts, rows: Rows) -> np.ndarray:
    """float64 [N]: what `reward` gives for N responses. For None, of TRL's form, which leaves a row
    to the others, NaN; of ours, which could not compute it, infinity. RewardError if it raises, or
    gives no finite number for one.
    """
    form, parameters = _form_of(name, reward, rows)
    try:
        arguments = _arguments(reward, form, parameters, responses, rows)
        if form == "ours":
            [returned] = _awaited([reward(*arguments.values())])
        elif form == "verl":
            calls = zip(*arguments.values())
            returned = _awaited([reward(**dict(zip(arguments, each))) for each in calls])
        else:
            [returned] = _awaited([reward(**arguments)])
        values = list(returned) if isinstance(returned, Iterable) else [returned]
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise RewardError(
            f"verifier {name!r} raised {type(error).__name__}: {error} "
            f"({line.filename}:{line.lineno}), on {len(rows)} responses, the first: "
            f"{_described(responses[0], rows[0])}"
        ) from error
    if isinstance(returned, str | Mapping) or len(values) != len(rows):
        raise RewardError(
            f"verifier {name!r} returned {returned!r:.80} for {len(rows)} responses, and must "
            "return a list with one number for each"
        )
    scores = np.zeros(len(rows))
    for i, value in enumerate(values):
        is_none = value is None and form in NONE
        scores[i] = NONE[form] if is_none else _number(value)
        if not (is_none or math.isfinite(scores[i])):
            raise RewardError(
                f"verifier {name!r} returned {value!r:.80}, which is not a finite number, for "
                f"{_described(responses[i], rows[i])}"
            )
    return scores


def _form_of(name: str, reward: Reward, rows: Rows) -> tuple[str, list[str]]:
    """Whose form `reward` has, and the parameters that it is called with, those of ours by
    position. RewardError if it has none of the forms, or takes what the rows do not have.
    """
    signature = inspect.signature(reward)
    takes = signature.parameters
    known_by = next((parameter for parameter in FORMS if parameter in takes), None)
    in_some = set().union(*(row.columns for row in rows))
    in_all = in_some.intersection(*(row.columns for row in rows))
    try:
        if known_by is None:
            if len(takes) < 3 or FOREIGN & takes.keys():
                raise TypeError("not one of the forms")
            signature.bind(*PLACES)
            _check_places(takes)
            return "ours", [*PLACES]
        form, others = FORMS[known_by]
        plural = "s" if form == "verl, batched" else ""
        given = {known_by, *others}
        offered = given | {f"{column}{plural}" for column in in_some}
        takes_all = form == "trl" and any(each.kind is each.VAR_KEYWORD for each in takes.values())
        parameters = [each for each in sorted(offered) if takes_all or each in takes]
        certain = given | {f"{column}{plural}" for column in in_all}
        signature.bind(**dict.fromkeys(certain.intersection(parameters)))
    except TypeError as error:
        raise RewardError(
            f"verifier {name!r} takes {signature}: {error}. It is called as f(responses, answers, "
            "rows), as TRL calls f(prompts, completions, and columns by name), or as verl calls "
            "f(data_source, solution_str, ground_truth, extra_info), each with an s if it takes a "
            f"batch. Columns that all rows have: {', '.join(sorted(in_all))}"
        ) from None
    return form, parameters


def _check_places(parameters: Iterable[str]) -> None:
    """TypeError if the name of one of the first three says that it is to hold something else.

    >>> _check_places(["model_answers", "golds", "_"])
    >>> _check_places(["questions", "responses", "answers"])
    Traceback (most recent call last):
    TypeError: 'questions' would be given the responses: name each for what it gets
    """
    for place, parameter in zip(PLACES, parameters):
        words = {word.rstrip("s") for word in re.findall("[a-z]+", parameter.lower())}
        if words & set(PLACES[place].split()) or "model" in words and place == "responses":
            continue
        if words & set(" ".join([*PLACES.values(), NO_PLACE]).split()):
            raise TypeError(f"{parameter!r} would be given the {place}: name each for what it gets")


def _arguments(
    reward: Reward, form: str, parameters: Sequence[str], responses: Texts, rows: Rows
) -> dict[str, list]:
    """Returns what `reward` is passed: copies of what there is, one for each response, by the
    parameters of `_form_of`.
    """
    given: list[Columns] = []
    for response, row in zip(responses, rows):
        columns = copy.deepcopy(row.columns)
        if form == "ours":
            given.append({"responses": response, "answers": row.answer, "rows": columns})
        elif form == "trl":
            prompt = columns.get("prompt") or columns.get("messages")
            is_text = isinstance(prompt, str) or inspect.ismethod(reward)  # ms-swift: a class
            spoken = [{"role": "assistant", "content": response}]
            completion = response if is_text else spoken
            given.append(columns | {"prompts": prompt, "completions": completion})
        else:
            truth = row.answer
            with suppress(KeyError, TypeError):
                truth = columns["reward_model"]["ground_truth"]
            said = {"solution_str": response, "ground_truth": truth}
            given.append({"extra_info": {}, **columns, **said})
    arguments = {}
    for name in parameters:
        column = name.removesuffix("s") if form == "verl, batched" else name
        arguments[name] = [each.get(column) for each in given]
    return arguments


def _awaited(values: list[Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*values)

    return asyncio.run(gather()) if any(map(inspect.isawaitable, values)) else values


def _number(value: Any) -> float:
    """NaN for what is no number; verl's dicts hold theirs as `score`."""
    if isinstance(value, Mapping):
        value = value.get("score")
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _described(response: str, row: Row) -> str:
    return (
        f"{row.where or 'a row'}: question {row.question!r:.200}, answer {row.answer!r:.200}, "
        f"response {response!r:.200}"
    )
