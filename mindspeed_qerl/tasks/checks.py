"""What is looked at in a task's files before a run: faults of the kind that leaves every curve
plausible.

Each check returns faults, which refuse the run, and warnings, which are sentences.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.recipe import types as recipe
from mindspeed_qerl.tasks.gsm8k.verifier import METHOD_OF_VERIFIER, canonical_number
from mindspeed_qerl.tasks.packed import rows_of_labels
from mindspeed_qerl.tasks.prompts import Prompts
from mindspeed_qerl.tasks.rewards import first_reward, is_reward, load_reward, try_reward
from mindspeed_qerl.tasks.rows import Row, read_rows


def missing_files(task: recipe.Task, keys: Iterable[str], quickstart: bool = False) -> list[Fault]:
    """A fault for each of the `keys` of section task whose file is not there."""
    fix = "Make it with `python tools/convert_gsm8k.py --input DIR_OR_HUB_NAME --output DIR`"
    if quickstart:
        tiny = "python tools/make_tiny_model.py --output models/tiny_qwen3_moe"
        fix += f", or for the quickstart `{tiny}`"
    fix += "; of your own: docs/own_task.md"
    faults = []
    for key in keys:
        file = getattr(task, key)
        if not Path(file).is_file():
            faults.append(Fault("file", f"task.{key} = {file!r}: no such file", f"task.{key}", fix))
    return faults


def unknown_rewards(
    verifiers: Iterable[tuple[str, float]], others: Iterable[str] = ()
) -> list[Fault]:
    """A fault for each (name, weight) that is no reward: neither one of ours, nor of the names
    `others`, nor to be imported.
    """
    faults = []
    for name, _ in verifiers:
        if name in others:
            continue
        try:
            load_reward(name, others)
        except ConfigError as error:
            faults.append(Fault("data", str(error), "rl_config.verifier_function"))
    return faults


def check_task(task: recipe.Task, train: Sequence[Row] | None) -> tuple[list[Fault], list[str]]:
    """(faults, warnings) of a task whose files are there, before anything heavy starts.

    Args:
        train: the training rows; None if only their token ids are there, which cannot be compared.
    """
    test = read_rows(task.test_file)
    names = [name for name, _ in task.verifiers]
    for name in filter(is_reward, names):
        rewarded = train or rows_of_labels([row.answer for row in test], None)
        try_reward(name, rewarded, may_skip=len(names) > 1)
    try_reward(first_reward(task.verifiers), test)
    return check_rows(train or [], test, names, task.allow_overlap)


def check_rows(
    train: Sequence[Row], test: Sequence[Row], verifiers: Sequence[str], allow_overlap: bool = False
) -> tuple[list[Fault], list[str]]:
    """(faults, warnings) of the rows that are trained on and tested with, for rewards of the names
    `verifiers`.
    """
    faults, warnings = [], []
    first_of = {normalised(row.question): row for row in reversed(train)}
    shared = [row for row in test if normalised(row.question) in first_of]
    if shared:
        twin = first_of[normalised(shared[0].question)]
        message = (
            f"{len(shared):,} of {len(test):,} test questions are training questions too, the "
            f"first {_cut(shared[0].question)} ({shared[0].where} and {twin.where})"
        )
        if allow_overlap:
            warnings.append(f"{message}; task.allow_overlap = true")
        else:
            message += ": the test would measure memory"
            fix = "Take them out of one file, or set task.allow_overlap=true"
            faults.append(Fault("data", message, "task.test_file", fix))
    elif train and len(test) > len(train):
        warnings.append(
            f"the test file has more rows ({len(test):,}) than the training file ({len(train):,}): "
            "are they swapped?"
        )
    warnings += _duplicates(train)
    if set(verifiers) & set(METHOD_OF_VERIFIER):
        for name, rows in (("training", train), ("test", test)):
            more_faults, more_warnings = _golds(name, rows)
            faults += more_faults
            warnings += more_warnings
    return faults, warnings


def normalised(question: str) -> str:
    """A question as it is compared with others: without case, width of characters, and spacing.

    >>> normalised("How  many\\nApples?") == normalised("how many apples?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def _duplicates(rows: Sequence[Row]) -> list[str]:
    counts = Counter(normalised(row.question) for row in rows)
    repeated = {question: count for question, count in counts.items() if count > 1}
    if not repeated:
        return []
    kinds = []
    for count, questions in sorted(Counter(repeated.values()).items()):
        verb = "is" if questions == 1 else "are"
        kinds.append(f"{questions:,} {verb} there {count:,} times")
    if len(kinds) > 4:
        kinds[2:-1] = ["..."]
    return [
        (
            f"{len(rows):,} training rows hold {len(counts):,} different questions: "
            f"{', '.join(kinds)}, the first {_cut(next(iter(repeated)))}"
        )
    ]


def _golds(name: str, rows: Sequence[Row]) -> tuple[list[Fault], list[str]]:
    """(faults, warnings): gold answers that GSM8K's verifiers cannot read, and those that are no
    integers.
    """
    unreadable, fractions = [], []
    for row in rows:
        try:
            number = canonical_number(row.answer)
        except ValueError:
            unreadable.append(row)
        else:
            if not number.lstrip("-").isdigit():
                fractions.append(row)
    faults, warnings = [], []
    have = f"of {len(rows):,} {name} rows have an answer that is"
    if unreadable:
        message = f"{len(unreadable):,} {have} no number: {_listed(unreadable)}"
        fix = (
            "GSM8K's verifiers want one: use another, or convert the file with "
            "tools/convert_gsm8k.py"
        )
        faults.append(Fault("data", message, "rl_config.verifier_function", fix))
    if fractions:
        message = f"{len(fractions):,} {have} no integer: {_listed(fractions)}"
        warnings.append(f"{message}. Is the point a decimal point?")
    return faults, warnings


def _listed(rows: Sequence[Row]) -> str:
    answers = [f"{_cut(row.answer)} ({row.where})" for row in rows[:3]]
    return ", ".join([*answers, "..."] if len(rows) > 3 else answers)


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def check_prompts(task: Prompts, tokenizer: Any, chat: bool) -> tuple[list[Fault], list[str]]:
    """(faults, warnings) of the prompts of a task: two questions with the same token ids, a prompt
    that does not hold its question, and, as a warning, words that the tokenizer does not know.

    The decoded prompt is searched for the question, and if it is not there, for what the tokenizer
    gives back of it: a tokenizer that lower-cases is no fault.
    """
    lost = f"the {'chat template' if chat else 'tokenizer'} loses the question"
    questions = [row.last_turn if chat else row.prompt or "" for row in task.rows]
    unreadable = [tokenizer.unk_token_id in ids for ids in task.prompts]
    first_with: dict[tuple[int, ...], str] = {}
    for row, text, ids, unknown in zip(task.rows, questions, task.prompts, unreadable):
        other = first_with.setdefault(tuple(ids), text)
        if not unknown and other != text and normalised(other) != normalised(text):
            message = (
                f"{_cut(text)} ({row.where}) and {_cut(other)} become the same {len(ids)} token "
                f"ids: {lost}"
            )
            fix = "Use the tokenizer that the model was trained with"
            return [Fault("data", message, fix=fix)], []
    for row, text, prompt in zip(task.rows, questions, tokenizer.batch_decode(task.prompts)):
        if text not in prompt:
            given_back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
            if normalised(given_back) not in normalised(prompt):
                message = (
                    f"{row.where}: {lost}. The question is {_cut(text)}, the prompt reads "
                    f"{prompt[:200]!r}"
                )
                return [Fault("data", message)], []
    if not any(unreadable):
        return [], []
    count = f"{sum(unreadable):,} of {len(questions):,} prompts"
    return [], [f"{count} hold words that the tokenizer does not know: is it the right one?"]
