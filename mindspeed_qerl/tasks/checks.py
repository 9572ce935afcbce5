"""What is looked at in a task's files before a run: faults of the kind that leaves every curve
plausible.
"""

import unicodedata
from collections.abc import Iterable
from itertools import islice
from typing import Any

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.common.files import row_files
from mindspeed_qerl.recipe import types as recipe
from mindspeed_qerl.recipe.reader import Faults, Found

from .gsm8k.verifier import METHOD_OF_VERIFIER, canonical_number
from .packed import rows_of_labels
from .prompts import Prompts
from .rewards import Verifiers, load_reward, try_rewards
from .rows import Row, Rows, read_rows

# What to do where a file of a task is missing.
MAKE_DATA = (
    "Make it with `python tools/convert_gsm8k.py --input DIR_OR_HUB_NAME --output DIR`; the "
    "quickstart's is in the repository; of your own: docs/own_task.md"
)


def missing_files(task: recipe.Task, keys: Iterable[str]) -> Faults:
    """A fault for each of the `keys` of section task whose file is not there."""
    for key in keys:
        file = getattr(task, key)
        try:
            row_files(file)
        except FileNotFoundError:
            message = f"task.{key} = {file!r}: no such file"
            yield Fault("file", message, f"task.{key}", MAKE_DATA)


def unknown_rewards(verifiers: Verifiers) -> Faults:
    """A fault for each (name, weight) that is no reward: neither one of ours nor to be imported."""
    for name, _ in verifiers:
        try:
            load_reward(name)
        except ConfigError as error:
            yield Fault("data", str(error), "rl_config.verifier_function")


def check_task(task: recipe.Task, train: Rows | None) -> Found:
    """Checks a task whose files are there, before anything heavy starts.

    Args:
        train: the training rows; None if only their token ids are there, which cannot be compared.
    """
    test = read_rows(task.test_file)
    given = train or rows_of_labels([row.answer for row in test], None)
    warnings = try_rewards(task.verifiers, given)
    try_rewards(task.verifiers[:1], test)
    found = check_rows(train or [], test, task)
    found.warnings[:0] = warnings
    return found


def check_rows(train: Rows, test: Rows, task: recipe.Task) -> Found:
    """Checks the rows that `task` is trained on and tested with, for its rewards."""
    found = Found()
    first_of = {normalised(row.question): row for row in reversed(train)}
    shared = [row for row in test if normalised(row.question) in first_of]
    if shared:
        first = shared[0]
        twin = first_of[normalised(first.question)]
        message = (
            f"{len(shared):,} of {len(test):,} test questions are training questions too, the "
            f"first {first.question!r:.60} ({first.where} and {twin.where})"
        )
        fix = "Take them out of one file, or set task.allow_overlap=true"
        if task.allow_overlap:
            found.warnings.append(message)
        else:
            found.faults.append(Fault("data", message, "task.test_file", fix))
    if len(first_of) < len(train):
        found.warnings.append(
            f"{len(train):,} training rows hold {len(first_of):,} different questions"
        )
    if METHOD_OF_VERIFIER.keys() & task.verifier_function:
        found.faults += islice(_unreadable_golds([*train, *test]), 3)
    return found


def normalised(question: str) -> str:
    """A question as it is compared with others: without case, width of characters, and spacing.

    >>> normalised("How  many\\nApples?") == normalised("how many apples?")
    True
    """
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def _unreadable_golds(rows: Iterable[Row]) -> Faults:
    for row in rows:
        try:
            canonical_number(row.answer)
        except ValueError as error:
            fix = "GSM8K's verifiers want numbers: use another, or correct the file"
            yield Fault("data", f"{row.where}: {error}", "rl_config.verifier_function", fix)


def check_prompts(task: Prompts, tokenizer: Any) -> Found:
    """Checks the prompts of a task: two questions with the same token ids, and, as a warning, words
    that the tokenizer does not know.
    """
    unreadable = 0
    first_with: dict[tuple[int, ...], Row] = {}
    for row, ids in zip(task.rows, task.prompts):
        if tokenizer.unk_token_id in ids:
            unreadable += 1
            continue
        other = first_with.setdefault(tuple(ids), row)
        if normalised(other.question) != normalised(row.question):
            message = (
                f"{row.question!r:.60} ({row.where}) and {other.question!r:.60} ({other.where}) "
                f"become the same {len(ids)} token ids: the tokenizer, or its chat template, loses "
                "the question"
            )
            fix = "Use the tokenizer that the model was trained with"
            return Found([Fault("data", message, fix=fix)])
    found = Found()
    if unreadable:
        found.warnings.append(
            f"{unreadable:,} of {len(task.rows):,} prompts hold words that the tokenizer does not "
            "know: is it the right one?"
        )
    return found
