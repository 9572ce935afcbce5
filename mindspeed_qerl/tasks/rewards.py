"""What an answer is worth: the rewards by name, a user's own by import path, and what they return, checked.

A reward is called as `f(responses, answers, rows)`: the decoded answers of the model, the `answer` of each one's row,
and that row with all its columns. It returns a number for each. docs/own_task.md shows one.
"""

import importlib
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS
from mindspeed_qerl.tasks.rows import Row

Reward = Callable[[list[str], list[str], list[dict[str, Any]]], Sequence[float]]


class RewardError(ConfigError):
    """A reward raised, or returned something that is not a finite number for each response; the message shows the
    row."""


def is_reward(name: str) -> bool:
    """Whether `name` is the name of a reward here, or has the form of an import path.

    >>> is_reward("gsm8k"), is_reward("my_module:my_reward"), is_reward("base_acc")
    (True, True, False)
    """
    return name in VERIFIERS or ":" in name


def first_reward(verifiers: Iterable[tuple[str, float]]) -> str:
    """The first of a config's verifiers that is a reward here, by which it is evaluated; "gsm8k" if none is."""
    return next(filter(is_reward, (name for name, _ in verifiers)), "gsm8k")


def load_reward(name: str, others: Iterable[str] = ()) -> Reward:
    """The reward called `name`: a name of `VERIFIERS`, or "module:function", which may be in the current folder.

    `others` are names that the engine has itself: for the advice only. ConfigError says what is wrong with the name,
    the module or the function, and what is nearest to it.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if not is_reward(name):
        path, _, function = name.rpartition(".")
        known = unknown("verifier", name, {*VERIFIERS, *others})
        raise ConfigError(f"rl_config.verifier_function: {known}. Your own is written "
                          f"{f'{path}:{function}' if path else 'module:function'}")
    path, _, function = name.partition(":")
    module = _import(name, path)
    found, file = getattr(module, function, None), getattr(module, "__file__", None) or path
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"verifier {name!r}: {unknown(f'function in {file}:', function, functions)}")
    if not callable(found):
        raise ConfigError(f"verifier {name!r}: {function} in {file} is no function but of type {type(found).__name__}")
    return found


def _import(name: str, path: str) -> Any:
    if path.endswith(".py") or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"verifier {name!r}: {path!r} is not a module. Write it as in an import, "
                          "my_package.my_module:my_reward")
    if os.getcwd() not in sys.path:  # python cli/train_grpo.py has cli/ there instead
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ConfigError(f"verifier {name!r}: no module {error.name!r}. Start from the folder that holds it "
                              f"(this is {os.getcwd()}), or put that folder on PYTHONPATH") from error
        raise ConfigError(f"verifier {name!r}: its module needs one that is missing: {error}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module does
        raise ConfigError(f"verifier {name!r}: importing {path} failed: {_describe(error)}") from error


def score(verifiers: Sequence[tuple[str, float]], responses: Sequence[str], rows: Sequence[Row],
          load: Callable[[str], Reward] = load_reward) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The weighted sum of several rewards.

    Args:
        verifiers: (name, weight) of each. responses, rows: N decoded answers, and the row that each of them answers.
        load: what finds a reward by its name.

    Returns:
        float64 [N] of weight times reward, summed; and by name the rewards themselves, float64 [N].

    Raises:
        ConfigError: there is no such reward. RewardError: one did not do its work.

    >>> from mindspeed_qerl.tasks.rows import row_of
    >>> row = row_of({"prompt": "2+2?", "answer": "4"})
    >>> score([("gsm8k", 1.0), ("gsm8k_strict", 0.5)], ["it is 4", "#### 4"], [row, row])[0]
    array([1. , 1.5])
    """
    scores = {name: call_reward(name, load(name), responses, rows) for name, _ in verifiers}
    return sum(weight * scores[name] for name, weight in verifiers), scores


def try_reward(name: str, rows: Sequence[Row]) -> None:
    """Call the reward on the first two rows, before anything heavy starts: with a row's answer as response, and with
    an empty one."""
    rows = rows[:2]
    try:
        call_reward(name, load_reward(name), [rows[0].answer, ""][:len(rows)], rows)
    except RewardError as error:
        raise RewardError(f"{error}. (It was tried before the start, with an answer and an empty text as "
                          "responses)") from error


def call_reward(name: str, reward: Reward, responses: Sequence[str], rows: Sequence[Row]) -> np.ndarray:
    """float64 [N]: what `reward` gives for N responses. RewardError if it raises, or gives no finite number for
    one."""
    try:
        given = _call(reward, responses, rows)
        no_list = not isinstance(given, Iterable) or isinstance(given, (str, bytes, Mapping, AbstractSet))
        values = None if no_list else list(given)
    except Exception as error:
        raise RewardError(f"verifier {name!r} raised {_describe(error)}, {_blame(reward, responses, rows)}") from error
    if values is None:
        raise RewardError(f"verifier {name!r} returned {given!r:.80} ({type(given).__name__}) instead of a list of "
                          f"{len(rows)} numbers")
    if len(values) != len(rows):
        first = f"; {_shown(len(values), responses, rows)} has none" if len(values) < len(rows) else ""
        raise RewardError(f"verifier {name!r} returned {len(values)} scores for {len(rows)} responses, and must "
                          f"return one for each{first}")
    scores = [_number(value) for value in values]
    for i, value in enumerate(scores):
        if value is None or not math.isfinite(value):
            raise RewardError(f"verifier {name!r} returned {values[i]!r:.80}, which is not a finite number, for "
                              f"{_shown(i, responses, rows)}")
    return np.array(scores, dtype=np.float64)


def _call(reward: Reward, responses: Sequence[str], rows: Sequence[Row]) -> Any:
    return reward(list(responses), [row.answer for row in rows], [dict(row.columns) for row in rows])


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _blame(reward: Reward, responses: Sequence[str], rows: Sequence[Row]) -> str:
    """Where a reward that raised fails: the first row that it fails on alone."""
    for i, (response, row) in enumerate(zip(responses, rows)):
        try:
            list(_call(reward, [response], [row]))
        except Exception:  # noqa: BLE001  it is the row that is looked for
            return f"on {_shown(i, responses, rows)}"
    return f"on {len(rows)} responses together, and on none of them alone; the first is {_shown(0, responses, rows)}"


def _shown(index: int, responses: Sequence[str], rows: Sequence[Row]) -> str:
    row = rows[index]
    cut = {"question": row.question, "answer": row.answer, "response": responses[index]}
    texts = [f"{name} {text if len(text) <= 200 else text[:197] + '...'!r}" for name, text in cut.items()]
    return f"row {index}{f' ({row.where})' if row.where else ''}: " + ", ".join(texts)


def _describe(error: BaseException) -> str:
    """The error in one line, and the line of the user's code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename != __file__ and not frame.filename.startswith("<frozen")]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
