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
import itertools
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
# Other libraries' forms, each known by a parameter.
FORMS = {"trl": "completions", "verl, batched": "solution_strs", "verl": "solution_str"}
# Parameters of other libraries' rewards: a function that has one is not called by position.
FOREIGN = {"completion", "completion_ids", "prompts", "prompt", "data_source", "data_sources"}
FOREIGN |= set(FORMS.values())
# What can be iterated and is no list of scores.
NO_LISTS = (str, bytes, Mapping, AbstractSet)


class RewardError(ConfigError):
    """A reward raised, or did not return a finite number for each response; with the row."""


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
        own = f"{path or 'module'}:{function if path else 'function'}"
        raise ConfigError(f"rl_config.verifier_function: {known}. Your own is written {own}")
    path, _, function = name.partition(":")
    module = _import(name, path)
    reward = getattr(module, function, None)
    file = getattr(module, "__file__", None) or path
    if reward is None:
        functions = inspect.getmembers(module, callable)
        nearest = unknown(f"function in {file}:", function, dict(functions))
        raise ConfigError(f"verifier {name!r}: {nearest}")
    if not callable(reward):
        kind = type(reward).__name__
        raise ConfigError(f"verifier {name!r}: {function} in {file} is of type {kind}, no function")
    if not inspect.isclass(reward):
        return reward
    try:
        return _made(reward).__call__  # type: ignore[arg-type]  # classes are hashable
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
    if not all(part.isidentifier() for part in path.split(".")) or path.endswith(".py"):
        raise ConfigError(
            f"verifier {name!r}: {path!r} is not a module. Write it as in an import, "
            "my_package.my_module:my_reward"
        )
    if os.getcwd() not in sys.path:  # python cli/train_grpo.py has cli/ there instead
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            fault = (
                f"no module {error.name!r}. Start from the folder that holds it (this is "
                f"{os.getcwd()}), or put that folder on PYTHONPATH"
            )
        else:
            fault = f"its module needs one that is missing: {error}"
        raise ConfigError(f"verifier {name!r}: {fault}") from error
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
    scores = {}
    for name, _ in verifiers:
        scores[name] = call_reward(name, load(name), responses, rows, may_skip=True)
    skipped = np.isnan([*scores.values()]).all(axis=0)
    if skipped.any():
        raise RewardError(
            f"verifier {', '.join(scores)}: None, and so no reward at all, for "
            f"{_shown(int(skipped.argmax()), responses, rows)}"
        )
    scores = {name: np.nan_to_num(values) for name, values in scores.items()}
    total = np.zeros(len(responses))
    for name, weight in verifiers:
        total += weight * scores[name]
    return total, scores


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
        is_list = isinstance(given, Iterable) and not isinstance(given, NO_LISTS)
        values = list(given) if is_list else None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and the panic of a library in Rust
        place = _blame(call, responses, rows)
        raise RewardError(f"verifier {name!r} raised {_describe(error)}, {place}") from error
    if values is None:
        raise RewardError(
            f"verifier {name!r} returned {given!r:.80} ({type(given).__name__}) instead of a list "
            f"of {len(rows)} numbers"
        )
    if len(values) != len(rows):
        missing = len(values) < len(rows)
        first = f"; {_shown(len(values), responses, rows)} has none" if missing else ""
        raise RewardError(
            f"verifier {name!r} returned {len(values)} scores for {len(rows)} responses, and must "
            f"return one for each{first}"
        )
    scores = np.zeros(len(rows))
    for i, value in enumerate(values):
        skipped = value is None and may_skip and form == "trl"
        scores[i] = math.nan if skipped else _number(value)
        if not skipped and not math.isfinite(scores[i]):
            raise RewardError(
                f"verifier {name!r} returned {value!r:.80}, which is not a finite number, for "
                f"{_shown(i, responses, rows)}"
            )
    return scores


def _form_of(name: str, reward: Reward, rows: Sequence[Row]) -> tuple[str, list[str]]:
    """Whose form `reward` has, and the parameters that it is called with by name (none: by
    position). RewardError if it has none of the forms, or takes what the rows do not have.
    """
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # some that are built in have none
        return "ours", []
    parameters = signature.parameters.values()
    named = [
        each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    names = [each.name for each in named]
    required = [each.name for each in named if each.default is each.empty]
    if set(OURS) <= set(names) and set(required) <= set(OURS):
        return "ours", list(OURS)
    if _takes_three(signature) and (names[2:3] == ["rows"] or not FOREIGN & set(names)):
        return "ours", []
    form = next((form for form, parameter in FORMS.items() if parameter in names), None)
    if form is None:
        raise RewardError(
            f"verifier {name!r} takes {signature}, and is called as f(responses, answers, rows), "
            "as TRL calls f(prompts, completions, and columns by name), or as verl calls "
            "f(data_source, solution_str, ground_truth, extra_info), each with an s if it takes a "
            "batch: name its parameters so"
        )
    plural = "s" if form == "verl, batched" else ""
    given, columns = _offered(form, plural, rows)
    for parameter in required:
        column = parameter.removesuffix(plural)
        without = [row for row in rows if column not in row.columns]
        if parameter not in given and (parameter not in columns or without):
            row = without[0] if without else rows[0]
            raise RewardError(
                f"verifier {name!r} takes {parameter!r}, and {row.where or 'a row'} has no such "
                f"column, but {', '.join(row.columns)}. It can take {', '.join(given)} and those: "
                "rename or add the column, or give the parameter a default"
            )
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return form, [each for each in (*given, *columns) if takes_any or each in names]


def _offered(form: str, plural: str, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """What a foreign form is given of the responses and rows, and which columns, by name."""
    if form == "trl":
        columns = dict.fromkeys(itertools.chain.from_iterable(row.columns for row in rows))
        given = ["completions"]
        if all(row.messages for row in rows):
            given.append("prompts")
        hidden = {"prompt", "completion", "completion_ids", *given}
        return given, [column for column in columns if column not in hidden]
    given = [f"{name}{plural}" for name in ("solution_str", "ground_truth", "extra_info")]
    if all("data_source" in row.columns for row in rows):
        return given, [f"data_source{plural}"]
    return given, []


def _takes_three(signature: inspect.Signature) -> bool:
    """Whether three arguments fit, and the parameters say more than (*args, **kwargs), which may
    hide any.
    """
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    try:
        signature.bind(*OURS)
    except TypeError:
        return False
    return kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


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
        if not parameters:
            return _awaited([reward(*values)])[0]
        known: dict[str, Any] = dict(zip(OURS, values))
    elif form == "trl":
        known = {name: [row.get(name) for row in columns] for name in parameters}
        known |= _conversations(responses, rows, texts=inspect.ismethod(reward))
    else:
        known = _verl_values(responses, rows, columns)
    if form == "verl, batched":
        known = {f"{name}s": values for name, values in known.items()}
    known = {name: known[name] for name in parameters}
    if form != "verl":
        return _awaited([reward(**known)])[0]
    return _awaited([reward(**dict(zip(known, values))) for values in zip(*known.values())])


def _verl_values(
    responses: Sequence[str], rows: Sequence[Row], columns: Sequence[dict[str, Any]]
) -> dict[str, list]:
    values: dict[str, list] = {"solution_str": list(responses), "data_source": []}
    values |= {"extra_info": [], "ground_truth": []}
    for row, copied in zip(rows, columns):
        values["data_source"].append(copied.get("data_source"))
        values["extra_info"].append(copied.get("extra_info") or {})
        reward_model = copied.get("reward_model")
        gold = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
        values["ground_truth"].append(row.answer if gold is None else gold)
    return values


def _conversations(responses: Sequence[str], rows: Sequence[Row], texts: bool) -> dict[str, list]:
    """TRL's `prompts` and `completions`: messages where a row's prompt is messages, unless `texts`
    are expected, as by ms-swift's classes.
    """
    prompts, completions = [], []
    for response, row in zip(responses, rows):
        prompt = row.columns.get("prompt")
        is_text = isinstance(prompt, str)
        prompts.append(prompt if is_text else copy.deepcopy(row.messages))
        spoken = [{"role": "assistant", "content": response}]
        completions.append(response if is_text or texts else spoken)
    return {"prompts": prompts, "completions": completions}


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


def _blame(call: Callable[..., Any], responses: Sequence[str], rows: Sequence[Row]) -> str:
    """Where the `call` of a reward that raised fails: the first row that it fails on alone."""
    for i, (response, row) in enumerate(zip(responses, rows)):
        try:
            list(call([response], [row]))
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001  it is the row that is looked for
            return f"on {_shown(i, responses, rows)}"
    first = _shown(0, responses, rows)
    return f"on {len(rows)} responses together, and on none of them alone; the first is {first}"


def _shown(index: int, responses: Sequence[str], rows: Sequence[Row]) -> str:
    row = rows[index]
    where = f" ({row.where})" if row.where else ""
    parts = (("question", row.question), ("answer", row.answer), ("response", responses[index]))
    return f"row {index}{where}: " + ", ".join(f"{name} {_cut(text)}" for name, text in parts)


def _cut(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:197] + "...")


def _describe(error: BaseException) -> str:
    """The error in one line, and the line of the user's code that raised it."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename != __file__ and not frame.filename.startswith("<frozen"):
            place = f" ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{place}"
