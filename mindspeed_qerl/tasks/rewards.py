"""What an answer is worth: the rewards by name, a user's own by import path, and what they return,
checked.

A reward is called as `f(responses, answers, rows)`: the decoded answers of the model, the `answer`
of each one's row, and that row with all its columns. It returns a number for each. docs/own_task.md
shows one. Rewards written for TRL, ms-swift and verl are known by their parameters (`_form_of`) and
called as their authors mean them.
"""

import asyncio
import copy
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_qerl.common.errors import ConfigError, unknown
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS
from mindspeed_qerl.tasks.rows import Row

Reward = Callable[..., Any]
OURS = ("responses", "answers", "rows")
# Parameters of other libraries' rewards: a function that has one is not called by position.
FOREIGN = {
    "completions",
    "completion",
    "completion_ids",
    "prompts",
    "prompt",
    "data_source",
    "data_sources",
    "solution_str",
    "solution_strs",
}


class RewardError(ConfigError):
    """A reward raised, or returned something that is not a finite number for each response; the
    message shows the row.
    """


def is_reward(name: str) -> bool:
    """Whether `name` is the name of a reward here, or has the form of an import path.

    >>> is_reward("gsm8k"), is_reward("my_module:my_reward"), is_reward("base_acc")
    (True, True, False)
    """
    return name in VERIFIERS or ":" in name


def first_reward(verifiers: Iterable[tuple[str, float]]) -> str:
    """The first of a config's verifiers that is a reward here, by which it is evaluated; "gsm8k" if
    none is.
    """
    return next(filter(is_reward, (name for name, _ in verifiers)), "gsm8k")


def load_reward(name: str, others: Iterable[str] = ()) -> Reward:
    """The reward called `name`: a name of `VERIFIERS`, or "module:function", which may be in the
    current folder.

    `others` are names that the engine has itself: for the advice only. ConfigError says what is
    wrong with the name, the module or the function, and what is nearest to it.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if not is_reward(name):
        path, _, function = name.rpartition(".")
        known = unknown("verifier", name, {*VERIFIERS, *others})
        raise ConfigError(
            f"rl_config.verifier_function: {known}. Your own is written "
            f"{f'{path}:{function}' if path else 'module:function'}"
        )
    path, _, function = name.partition(":")
    module = _import(name, path)
    found, file = getattr(module, function, None), getattr(module, "__file__", None) or path
    if found is None:
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise ConfigError(
            f"verifier {name!r}: {unknown(f'function in {file}:', function, functions)}"
        )
    if not callable(found):
        raise ConfigError(
            f"verifier {name!r}: {function} in {file} is no function but of type "
            f"{type(found).__name__}"
        )
    if not inspect.isclass(found):
        return found
    try:
        return _made(found).__call__
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"verifier {name!r}: {function} in {file} is a class, and {function}() failed: "
            f"{_describe(error)}"
        ) from error


@cache
def _made(cls: type) -> Any:
    """The one instance of a class of rewards, as ms-swift makes it."""
    return cls()


def _import(name: str, path: str) -> Any:
    if path.endswith(".py") or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"verifier {name!r}: {path!r} is not a module. Write it as in an import, "
            "my_package.my_module:my_reward"
        )
    if os.getcwd() not in sys.path:  # python cli/train_grpo.py has cli/ there instead
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            raise ConfigError(
                f"verifier {name!r}: no module {error.name!r}. Start from the folder that holds it "
                f"(this is {os.getcwd()}), or put that folder on PYTHONPATH"
            ) from error
        raise ConfigError(
            f"verifier {name!r}: its module needs one that is missing: {error}"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's module does
        raise ConfigError(
            f"verifier {name!r}: importing {path} failed: {_describe(error)}"
        ) from error


def score(
    verifiers: Sequence[tuple[str, float]],
    responses: Sequence[str],
    rows: Sequence[Row],
    load: Callable[[str], Reward] = load_reward,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The weighted sum of several rewards.

    Args:
        verifiers: (name, weight) of each. responses, rows: N decoded answers, and the row that each
            of them answers.
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
    scores = {
        name: call_reward(name, load(name), responses, rows, may_skip=True) for name, _ in verifiers
    }
    skipped = np.isnan([*scores.values()]).all(axis=0)
    if skipped.any():
        raise RewardError(
            f"verifier {', '.join(scores)}: None, and so no reward at all, for "
            f"{_shown(int(skipped.argmax()), responses, rows)}"
        )
    scores = {name: np.nan_to_num(values) for name, values in scores.items()}
    return sum(weight * scores[name] for name, weight in verifiers), scores


def try_reward(name: str, rows: Sequence[Row], may_skip: bool = False) -> None:
    """Call the reward on the first two rows, before anything heavy starts: with a row's answer as
    response, and with an empty one; `may_skip` as in `call_reward`. All rows are looked through for
    the columns that it takes.
    """
    reward = load_reward(name)
    _form_of(name, reward, rows)
    rows = rows[:2]
    try:
        call_reward(name, reward, [rows[0].answer, ""][: len(rows)], rows, may_skip)
    except RewardError as error:
        raise RewardError(
            f"{error}. (It was tried before the start, with an answer and an empty text as "
            "responses)"
        ) from error


def call_reward(
    name: str, reward: Reward, responses: Sequence[str], rows: Sequence[Row], may_skip: bool = False
) -> np.ndarray:
    """float64 [N]: what `reward` gives for N responses. RewardError if it raises, or gives no
    finite number for one; with `may_skip` None is NaN where a reward of TRL's form leaves a row to
    others.
    """
    form, parameters = _form_of(name, reward, rows)
    call = partial(_call, reward, form, parameters)
    try:
        given = call(responses, rows)
        no_list = not isinstance(given, Iterable) or isinstance(
            given, (str, bytes, Mapping, AbstractSet)
        )
        values = None if no_list else list(given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and the panic of a library in Rust
        raise RewardError(
            f"verifier {name!r} raised {_describe(error)}, {_blame(call, responses, rows)}"
        ) from error
    if values is None:
        raise RewardError(
            f"verifier {name!r} returned {given!r:.80} ({type(given).__name__}) instead of a list "
            f"of {len(rows)} numbers"
        )
    if len(values) != len(rows):
        first = (
            f"; {_shown(len(values), responses, rows)} has none" if len(values) < len(rows) else ""
        )
        raise RewardError(
            f"verifier {name!r} returned {len(values)} scores for {len(rows)} responses, and must "
            f"return one for each{first}"
        )
    scores = [_number(value) for value in values]
    for i, value in enumerate(scores):
        if may_skip and form == "trl" and values[i] is None:
            scores[i] = math.nan
        elif value is None or not math.isfinite(value):
            raise RewardError(
                f"verifier {name!r} returned {values[i]!r:.80}, which is not a finite number, for "
                f"{_shown(i, responses, rows)}"
            )
    return np.array(scores, dtype=np.float64)


def _form_of(name: str, reward: Reward, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Whose form `reward` has, and the parameters that it is called with by name (none: by
    position). RewardError if it has none of the forms, or takes what the rows do not have.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some that are built in have none
        return "ours", []
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    named = {
        each.name: each
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    required = [each.name for each in named.values() if each.default is each.empty]
    columns = list(dict.fromkeys(column for row in rows for column in row.columns))
    everywhere = {column for column in columns if all(column in row.columns for row in rows)}
    if set(OURS) <= named.keys() and set(required) <= set(OURS):
        form, given, others = "ours", list(OURS), []
    elif _takes_three(signature) and (list(named)[2:3] == ["rows"] or not named.keys() & FOREIGN):
        return "ours", []
    elif "completions" in named:
        prompts = ["prompts"] if all(row.messages for row in rows) else []
        form, given = "trl", ["completions", *prompts]
        others = [
            column
            for column in columns
            if column not in ("prompt", "completion", "completion_ids", *given)
        ]
    elif "solution_strs" in named:
        form, given = "verl, batched", ["solution_strs", "ground_truths", "extra_infos"]
        others = ["data_sources"] if "data_source" in everywhere else []
    elif "solution_str" in named:
        form, given = "verl", ["solution_str", "ground_truth", "extra_info"]
        others = ["data_source"] if "data_source" in everywhere else []
    else:
        raise RewardError(
            f"verifier {name!r} takes {signature}, and is called as f(responses, answers, rows), "
            "as TRL calls f(prompts, completions, and columns by name), or as verl calls "
            "f(data_source, solution_str, ground_truth, extra_info), each with an s if it takes a "
            "batch: name its parameters so"
        )
    lacking = [each for each in required if each not in given and each not in others]
    lacking += [
        each for each in required if form == "trl" and each in others and each not in everywhere
    ]
    if lacking:
        column = lacking[0].removesuffix("s") if form == "verl, batched" else lacking[0]
        row = next((row for row in rows if column not in row.columns), rows[0])
        raise RewardError(
            f"verifier {name!r} takes {lacking[0]!r}, and {row.where or 'a row'} has no such "
            f"column, but {', '.join(row.columns)}. It can take {', '.join(given)} and those: "
            "rename or add the column, or give the parameter a default"
        )
    takes_any = form != "ours" and inspect.Parameter.VAR_KEYWORD in kinds
    return form, [each for each in [*given, *others] if takes_any or each in named]


def _takes_three(signature: inspect.Signature) -> bool:
    """Whether three arguments fit, and the parameters say more than (*args, **kwargs), which may
    hide any.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return False
    try:
        signature.bind(*OURS)
    except TypeError:
        return False
    return True


def _call(
    reward: Reward,
    form: str,
    parameters: Sequence[str],
    responses: Sequence[str],
    rows: Sequence[Row],
) -> Any:
    """What `reward` returns for copies of what there is, by the parameters of `_form_of`."""
    columns = [copy.deepcopy(row.columns) for row in rows]
    if form == "ours":
        values = [list(responses), [row.answer for row in rows], columns]
        return _awaited(reward(**dict(zip(OURS, values))) if parameters else reward(*values))
    if form == "trl":
        known = {name: [of_row.get(name) for of_row in columns] for name in parameters}
        known |= _of_trl(responses, rows, texts=inspect.ismethod(reward))
        return _awaited(reward(**{name: known[name] for name in parameters}))
    known = {
        "solution_str": list(responses),
        "data_source": [of_row.get("data_source") for of_row in columns],
        "extra_info": [of_row.get("extra_info") or {} for of_row in columns],
        "ground_truth": [_verl_gold(of_row, row) for of_row, row in zip(columns, rows)],
    }
    if form == "verl, batched":
        given = _awaited(reward(**{name: known[name.removesuffix("s")] for name in parameters}))
    else:
        given = [reward(**{name: known[name][i] for name in parameters}) for i in range(len(rows))]
        given = asyncio.run(_together(given)) if any(map(inspect.isawaitable, given)) else given
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        return given
    return [
        value["score"] if isinstance(value, Mapping) and "score" in value else value
        for value in given
    ]


def _of_trl(responses: Sequence[str], rows: Sequence[Row], texts: bool) -> dict[str, list]:
    """TRL's `prompts` and `completions`: messages where a row's prompt is messages, unless `texts`
    are asked for, as by ms-swift's classes.
    """
    known = {"prompts": [], "completions": []}
    for response, row in zip(responses, rows):
        prompt = row.columns.get("prompt")
        is_text = isinstance(prompt, str)
        known["prompts"].append(prompt if is_text else copy.deepcopy(row.messages))
        known["completions"].append(
            response if is_text or texts else [{"role": "assistant", "content": response}]
        )
    return known


def _verl_gold(columns: dict[str, Any], row: Row) -> Any:
    of_verl = columns.get("reward_model")
    given = of_verl.get("ground_truth") if isinstance(of_verl, dict) else None
    return row.answer if given is None else given


def _awaited(given: Any) -> Any:
    async def wait() -> Any:
        return await given

    return asyncio.run(wait()) if inspect.isawaitable(given) else given


async def _together(calls: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*calls))


def _number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _blame(call: Callable[..., Any], responses: Sequence[str], rows: Sequence[Row]) -> str:
    """Where the `call` of a reward that raised fails: the first row that it fails on alone."""
    for i, (response, row) in enumerate(zip(responses, rows)):
        try:
            list(call([response], [row]))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  it is the row that is looked for
            return f"on {_shown(i, responses, rows)}"
    return f"on {len(rows)} responses together, and on none of them alone; the first is {_shown(0, responses, rows)}"


def _shown(index: int, responses: Sequence[str], rows: Sequence[Row]) -> str:
    row = rows[index]
    cut = {"question": row.question, "answer": row.answer, "response": responses[index]}
    texts = [
        f"{name} {text if len(text) <= 200 else text[:197] + '...'!r}" for name, text in cut.items()
    ]
    return f"row {index}{f' ({row.where})' if row.where else ''}: " + ", ".join(texts)


def _describe(error: BaseException) -> str:
    """The error in one line, and the line of the user's code that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
