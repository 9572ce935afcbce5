"""The files that a run reads: the model's, training and test data, and the base weights in
Megatron's format.
"""

import re
import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from mindspeed_qerl.ascend.resume import conversion_command
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import TRACKER, rank_folders
from mindspeed_qerl.families.checkpoint import whole_files
from mindspeed_qerl.families.fingerprint import is_pointer
from mindspeed_qerl.layout.parts import BF16
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.sizes import model_parameters, training_weights
from mindspeed_qerl.preflight.case import (
    Case,
    Check,
    Question,
    enough,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)
from mindspeed_qerl.tasks.checks import check_rows
from mindspeed_qerl.tasks.packed import read_packed, read_packed_rows
from mindspeed_qerl.tasks.rows import Row, read_rows

NEARLY = 0.95  # of a computed size: what is below it is another file


def tokenizer(case: Case) -> Check:
    folder = Path(case.recipe.model.path)
    file = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    if not file.is_file() or is_pointer(file):
        return failed(f"{file} is not there, or is a pointer of git-lfs")
    settings = case.machine.read(folder / "tokenizer_config.json")
    if case.recipe.task.prompt != "chat" or template.is_file() or "chat_template" in settings:
        return passed("there")
    return warning("no chat template")


def weights(case: Case) -> Check:
    """All files that the model's index names, of the size of this model: failed while the run or
    the conversion of the base weights reads them, else a warning.
    """
    folder = Path(case.recipe.model.path)
    verdict = failed if case.base_to_convert or not case.upstream else warning
    assert case.plan
    least = NEARLY * BF16 * model_parameters(case.plan.shape)
    try:
        size = sum((folder / name).stat().st_size for name in whole_files(folder))
    except ConfigError as error:
        return verdict(str(error))
    if size < least:
        return verdict(
            f"{gigabytes(size)}, and the model of config.json has {gigabytes(least / NEARLY)} in "
            "16 bits: pointers of git-lfs, an interrupted download, or another model"
        )
    return passed(f"all files, {gigabytes(size)}")


def _packed(case: Case) -> tuple[Any, Any, Any]:
    """Tokens of each prompt, all token ids, tokens of each label, of the packed files that
    upstream's trainer reads; OSError or ValueError where they cannot be read.
    """
    prefix = case.recipe.task.data_path
    lengths, tokens = read_packed(f"{prefix}_packed_input_ids_document")
    labels, _ = read_packed(f"{prefix}_packed_labels_document")
    if len(lengths) != len(labels):
        raise ValueError(f"{len(lengths):,} prompts and {len(labels):,} labels")
    return lengths, tokens, labels


def training_files(case: Case) -> Check:
    """Upstream keeps prompts that are shorter than max_prompt_length (indexed_dataset.py:545)."""
    recipe = case.recipe
    fix = "python tools/convert_gsm8k.py --input openai/gsm8k --output "
    fix += f"{quoted(Path(recipe.task.data_path).parent)} --format mindspeed --tokenizer "
    fix += f"{recipe.model.path} --max-prompt-length {recipe.sampling.max_prompt_length}"
    try:
        lengths, tokens, labels = _packed(case)
    except FileNotFoundError as error:
        return failed(f"no file {error.filename}", fix)
    except (OSError, ValueError) as error:
        return failed(str(error), fix)
    empty = int((labels == 0).sum())
    largest = int(tokens.max(initial=0))
    if empty:
        words = f"{empty:,} of {len(labels):,} labels are empty: nothing to verify against"
        return failed(words, fix)
    vocabulary = recipe.npu.padded_vocab_size
    if vocabulary and largest >= vocabulary:
        words = f"token ids up to {largest:,}; padded_vocab_size is {vocabulary:,}"
        return failed(f"{words}: another model's tokenizer", fix)
    limit = recipe.sampling.max_prompt_length
    longest = int(lengths.max(initial=0))
    kept = int((lengths < limit).sum())
    words = f"{kept:,} of {len(lengths):,} prompts have less than max_prompt_length = {limit} "
    words += "tokens and are trained"
    fix = f"rl_config.max_prompt_length={longest + 1}    # an override; the others must hold it"
    return enough(kept, recipe.batch.global_batch_size, len(lengths), words, fix)


def overlap(case: Case) -> Check:
    """Checks whether what is trained on is what is tested with: the training file's questions, or
    those kept beside a packed file, against the test file's; and how many prompts a packed file
    has.
    """
    task = case.recipe.task
    packed = 0
    train = _rows(task.train_file)
    test = _rows(task.test_file)
    if case.upstream:
        with suppress(OSError, ValueError):
            packed = len(_packed(case)[0])
            train = read_packed_rows(task.data_path) or train
    if not test or not (train or packed):
        return skipped("one of them is missing above")
    verdict = warning if task.allow_overlap else failed
    shared = check_rows(train, test, ()).faults
    if shared:
        return verdict(shared[0].message)
    words = f"{packed:,} packed prompts, {len(train):,} training rows, {len(test):,} test rows"
    if packed in (0, len(train)) or not train:
        return passed(f"{words}; no question is in both files")
    if packed != len(test):
        verdict = warning
    return verdict(f"{words}: they are not of one conversion")


def _rows(file: str) -> list[Row]:
    try:
        return read_rows(file)
    except (OSError, ValueError):
        return []


def converted(case: Case, key: str) -> Check:
    file = getattr(case.recipe.task, key)
    try:
        rows = read_rows(file)
    except (OSError, ValueError) as error:
        folder = Path(file).parent
        model = Path(case.recipe.model.path)
        fix = f"python tools/convert_gsm8k.py --input openai/gsm8k --output {quoted(folder)}"
        if folder.parent == model:  # of the quickstart, or of the studies
            deep = " --deep" * (model.name == "steps_qwen3_moe")
            fix = f"python tools/make_tiny_model.py --output {quoted(model)}{deep}"
        return failed(str(error), fix)
    return passed(f"{len(rows):,} in {Path(file).name}, each with a prompt and an answer")


def quoted(path: object) -> str:
    """A path as it is typed in a command.

    >>> quoted("/data/my models")
    "'/data/my models'"
    """
    return shlex.quote(str(path))


def conversion(case: Case) -> list[str]:
    """The command that converts the base weights, as words.

    Raises:
        ConfigError: the layout breaks a rule, `load` is named after another one, or there is no
            such command.
    """
    if case.plan is None:
        raise ConfigError(*(case.unread or case.faults))
    load = case.recipe.model.load
    layout = case.plan.layout
    if not load:
        return conversion_command(case.recipe)  # says so
    rules = [rule.message for rule in broken(case.plan)]
    if rules:
        raise ConfigError(
            f"no conversion for a layout that cannot exist: {'; '.join(rules)}. The nearest that "
            f"can: python tools/plan_layout.py --config-name {case.name}, with the same overrides"
        )
    sizes = (layout.tp, layout.pp, layout.ep)
    named = re.search(r"-tp(\d+)-pp(\d+)(?:-ep(\d+))?/*$", load)
    if named and any(size and int(size) != own for size, own in zip(named.groups(), sizes)):
        own = f"{load[: named.start()]}-tp{layout.tp}-pp{layout.pp}"
        if named[3]:
            own += f"-ep{layout.ep}"
        raise ConfigError(
            f"actor_config.load = {load} is named after another layout than the config's TP "
            f"{layout.tp} PP {layout.pp} EP {layout.ep}, and a folder holds the weights of one: "
            f"set actor_config.load={own}"
        )
    return conversion_command(case.recipe)


def base_weights(case: Case) -> Check:
    """The base weights in Megatron's format: one file for each tensor, pipeline and expert rank of
    this layout, a whole zip of a rank's size.
    """
    load = case.recipe.model.load
    plan = case.plan
    if not load:
        return warning("actor_config.load is not set: random weights are trained")
    assert plan
    try:
        fix = f"(cd MindSpeed-LLM && CUDA_DEVICE_MAX_CONNECTIONS=1 {shlex.join(conversion(case))})"
    except ConfigError as error:
        fix = str(error)
    tracker = case.machine.read(Path(load) / TRACKER).strip()
    if not tracker:
        return failed(f"no {TRACKER} in {load}: not converted yet", fix)
    # else "release"
    iteration = f"iter_{int(tracker):07d}" if tracker.isdigit() else tracker
    layout = plan.layout
    paths = (Path(load) / iteration).glob("mp_rank_*/model_optim_rng.pt")
    files = {path.parent.name: path for path in paths}
    shares = {}  # bytes of a rank's file
    for (_, stage, _), folder in rank_folders(layout.tp, layout.pp, layout.ep).items():
        shares[folder] = BF16 * sum(training_weights(plan, stage))
    wanted = f"TP {layout.tp} PP {layout.pp} EP {layout.ep} needs {len(shares)} files"
    if files.keys() != shares.keys():
        return failed(
            f"{load} has {len(files)} files, {wanted}, {min(shares)} to {max(shares)}: another "
            "layout, or an interrupted conversion (it writes the tracker first)",
            fix,
        )
    for name, file in sorted(files.items()):
        size = file.stat().st_size
        if not is_zipfile(file):
            words = "an interrupted conversion, or a pointer of git-lfs (git lfs pull)"
            return failed(f"{name}/{file.name} is not whole: {words}", fix)
        if size < NEARLY * shares[name]:
            words = f"a rank's share of this model is {gigabytes(shares[name])}: another model's?"
            return failed(f"{name}/{file.name} has {gigabytes(size)}; {words}", fix)
    return passed(f"{wanted}, which are there")


MODEL = [
    Question(
        "tokenizer",
        "Is there a tokenizer, with a chat template if one is needed?",
        tokenizer,
        "Download the model's whole directory (git lfs pull)\n"
        "Take an instruct or chat model, or add its chat_template.jinja",
        "model_given",
    ),
    Question(
        "weights",
        "Are the weight files of the index there, whole, and of this model?",
        weights,
        "Download the model's whole directory (git lfs pull)",
        "model_given plan",
    ),
]

DATA = [
    Question(
        "training rows",
        "Can the training file be read?",
        partial(converted, key="train_file"),
        "python tools/convert_gsm8k.py --input openai/gsm8k --output DIR",
        "reads_rows",
    ),
    Question(
        "training files",
        "Are packed prompts and labels there, as many of both, none empty, of the model's "
        "vocabulary and shorter than max_prompt_length?",
        training_files,
        "python tools/convert_gsm8k.py --input openai/gsm8k --output DIR --format mindspeed "
        "--tokenizer MODEL",
        "upstream",
    ),
    Question(
        "test rows",
        "Can the test file be read?",
        partial(converted, key="test_file"),
        "python tools/convert_gsm8k.py --input openai/gsm8k --output DIR",
    ),
    Question(
        "train and test",
        "Is no test question trained on?",
        overlap,
        "Convert the data again, or if it is meant: task.allow_overlap=true    # an override",
    ),
]

CHECKPOINTS = [
    Question(
        "base weights",
        "Is there one whole file of this model for each rank of the layout?",
        base_weights,
        "The conversion: python tools/preflight.py --config-name NAME --print-conversion",
        "upstream plan",
    )
]
