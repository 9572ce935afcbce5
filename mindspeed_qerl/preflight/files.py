"""The files that a run reads: training and test data, and the base weights in Megatron's format."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from zipfile import is_zipfile

from mindspeed_qerl.ascend.convert import conversion_command
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import TRACKER, rank_folder
from mindspeed_qerl.families.fingerprint import is_pointer
from mindspeed_qerl.layout.parts import BF16
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.weights import training_weights
from mindspeed_qerl.preflight.case import (
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    gigabytes,
    quoted,
)
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.recipe.types import Layout
from mindspeed_qerl.tasks.checks import check_rows, normalised
from mindspeed_qerl.tasks.packed import read_packed, read_packed_rows
from mindspeed_qerl.tasks.rows import Row, read_rows

NEARLY = 0.95  # of a computed size: what is below it is another file
LOOKED_FOR = 200  # test questions in the packed prompts


def training_data(machine: Machine, case: Case) -> Iterator[Check]:
    """The packed files that upstream's trainer reads: prompts and labels, as many of both, and how
    many prompts are too long.
    """
    task, limit, batch = (
        case.recipe.task,
        case.recipe.sampling.max_prompt_length,
        case.recipe.batch.global_batch_size,
    )
    if not case.upstream:
        yield _converted("training rows", task.train_file)
        return
    folder = quoted(Path(task.data_path).parent)
    fix = (
        f"python tools/convert_gsm8k.py --input openai/gsm8k --output {folder} --format "
        f"mindspeed --tokenizer {Path(case.recipe.model.path)} --max-prompt-length {limit}"
    )
    try:
        lengths, tokens = read_packed(f"{task.data_path}_packed_input_ids_document")
        labels, _ = read_packed(f"{task.data_path}_packed_labels_document")
        if len(lengths) != len(labels):
            raise ValueError(f"{len(lengths):,} prompts and {len(labels):,} labels")
    except (OSError, ValueError) as error:
        yield Check("training files", FAILED, _unreadable(error, task.data_path), fix)
        return
    if empty := int((labels == 0).sum()):
        yield Check(
            "labels",
            FAILED,
            f"{empty:,} of {len(lengths):,} are empty: nothing to verify against",
            fix,
        )
    else:
        yield Check("training files", PASSED, f"{len(lengths):,} prompts and labels")
    kept, longest = (
        int((lengths < limit).sum()),
        int(lengths.max(initial=0)),
    )  # indexed_dataset.py:545
    if kept == len(lengths):
        yield Check(
            "prompt lengths", PASSED, f"at most {longest} tokens; max_prompt_length is {limit}"
        )
    else:
        few = f", fewer than one batch of {batch}" if kept < batch else ""
        yield Check(
            "prompt lengths",
            FAILED if few else WARNING,
            f"{len(lengths) - kept:,} of {len(lengths):,} have "
            f"max_prompt_length = {limit} tokens or more and are left out{few}",
            "rl_config.max_prompt_length="
            f"{longest + 1}    # an override; seq_length and max_model_len must hold it",
        )
    vocabulary, largest = case.recipe.npu.padded_vocab_size, tokens.max(initial=0)
    if vocabulary and largest >= vocabulary:
        yield Check(
            "token ids",
            FAILED,
            f"up to {largest}, and the model's vocabulary has {vocabulary:,}: another "
            "model's tokenizer",
            fix,
        )
    else:
        yield Check(
            "token ids",
            PASSED,
            f"up to {largest:,}" + (f" of a vocabulary of {vocabulary:,}" if vocabulary else ""),
        )


def overlap(machine: Machine, case: Case) -> Iterator[Check]:
    """Whether what is trained on is what is tested with: the training file's questions beside the
    test file's, and for a packed file its number of rows, and its prompts, read back with the
    model's tokenizer, beside test questions.
    """
    task = case.recipe.task
    train, test = (_rows(file) for file in (task.train_file, task.test_file))
    try:
        packed, tokens = (
            read_packed(f"{task.data_path}_packed_input_ids_document")
            if case.upstream
            else ([], [])
        )
        train = (read_packed_rows(task.data_path) if case.upstream else None) or train
    except (OSError, ValueError):
        packed, tokens = [], []
    if not test or not train and not len(packed):
        yield Check("train and test", SKIPPED, "one of them is missing above")
        return
    fix = "Convert the data again (docs/own_task.md), or if it is meant: task.allow_overlap=true    # an override"
    state = WARNING if task.allow_overlap else FAILED
    if shared := check_rows(train or [], test, ())[0]:
        yield Check("train and test", state, shared[0].message, fix)
        return
    name = re.sub(r":( row)? ?\d+$", "", Path(train[0].where).name) if train else ""
    found = [f"no question of {len(test):,} is among those of {name}"] if train else []
    if len(packed):
        looked, there = _asked_again(case, packed, tokens, test)
        if there:
            yield Check(
                "train and test",
                state,
                f"{there:,} of {looked:,} test questions are among the packed training prompts",
                fix,
            )
            return
        found += [f"no question of {looked:,} among the packed prompts"] if looked else []
        if train and len(packed) != len(train):
            same = ", as many as there are test rows" if len(packed) == len(test) else ""
            yield Check(
                "train and test",
                state if same else WARNING,
                f"{len(packed):,} packed prompts{same}; "
                f"{name} has {len(train):,}: they are not of one conversion",
                fix,
            )
            return
    counts = f"{len(packed):,} packed prompts, {len(test):,} test rows"
    yield Check("train and test", PASSED, "; ".join(found) or counts)


def _rows(file: str) -> list[Row]:
    try:
        return read_rows(file)
    except (OSError, ValueError):
        return []


def _asked_again(
    case: Case, lengths: Sequence[int], tokens: Sequence[int], test: list[Row]
) -> tuple[int, int]:
    """(how many test questions were looked for in the packed prompts, how many are there): at most
    LOOKED_FOR of them, evenly drawn; none where the tokenizer cannot be read.
    """
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(case.recipe.model.path) / "tokenizer.json"))
    except Exception:  # noqa: BLE001  not installed, no such file, or the bare Exception of its Rust side
        return 0, 0
    ends = list(accumulate(map(int, lengths)))
    prompts = [tokens[begin:end].tolist() for begin, end in zip([0, *ends], ends)]
    texts = [normalised(text) for text in tokenizer.decode_batch(prompts)]
    looked = test[:: max(1, -(-len(test) // LOOKED_FOR))]
    return len(looked), sum(_is_among(texts, row) for row in looked)


def _is_among(prompts: Sequence[str], row: Row) -> bool:
    """Whether one of the prompts has the row's question, or all turns of its conversation."""
    asked = (
        [row.question]
        if row.prompt is not None
        else [turn["content"] or "" for turn in row.messages]
    )
    asked = [normalised(text) for text in asked]
    return any(all(text in prompt for text in asked) for prompt in prompts)


def test_data(machine: Machine, case: Case) -> Iterator[Check]:
    yield _converted("test rows", case.recipe.task.test_file)


def _converted(name: str, file: str) -> Check:
    try:
        rows = read_rows(file)
    except (OSError, ValueError) as error:
        return Check(
            name,
            FAILED,
            _unreadable(error, file),
            "python tools/convert_gsm8k.py --input openai/gsm8k --output "
            f"{quoted(Path(file).parent)}",
        )
    return Check(
        name, PASSED, f"{len(rows):,} in {Path(file).name}, each with a prompt and an answer"
    )


def _unreadable(error: Exception, file: str) -> str:
    path = Path(getattr(error, "filename", None) or file)
    return (
        f"no {path.name} in {path.parent}" if isinstance(error, FileNotFoundError) else str(error)
    )


def conversion(case: Case) -> list[str]:
    """The command that converts the base weights, as words.

    Raises:
        ConfigError: the layout breaks a rule, `load` is named after another one, or there is no
            such command.
    """
    if case.plan is None:
        raise ConfigError(*(case.unread or case.faults))
    if not case.recipe.model.load:
        return conversion_command(case.recipe)  # says so
    rules = [rule.message for rule in broken(case.plan)]
    if rules:
        raise ConfigError(
            f"no conversion for a layout that cannot exist: {'; '.join(rules)}. The nearest that "
            f"can: python tools/plan_layout.py --config-name {case.name}, with the same overrides"
        )
    load, it = case.recipe.model.load, case.plan.layout
    named = re.search(r"-tp(\d+)-pp(\d+)(?:-ep(\d+))?/*$", load)
    if named and any(
        size and int(size) != wanted for size, wanted in zip(named.groups(), (it.tp, it.pp, it.ep))
    ):
        own = f"{load[: named.start()]}-tp{it.tp}-pp{it.pp}" + (f"-ep{it.ep}" if named[3] else "")
        raise ConfigError(
            f"actor_config.load = {load} is named after another layout than the config's TP "
            f"{it.tp} PP {it.pp} EP {it.ep}, and a folder holds the weights of one: set "
            f"actor_config.load={own}"
        )
    return conversion_command(case.recipe)


def base_checkpoint(machine: Machine, case: Case) -> Iterator[Check]:
    """The base weights in Megatron's format: one file for each tensor, pipeline and expert rank of
    this layout.
    """
    if case.rehearsal or not case.upstream:
        why = (
            "a rehearsal's model has its own"
            if case.rehearsal
            else "this engine reads the Hugging Face files"
        )
        yield Check("base weights", SKIPPED, why)
    elif not case.recipe.model.load:
        yield Check(
            "base weights",
            WARNING,
            "actor_config.load is not set: random weights are trained",
            "actor_config.load=DIR",
        )
    elif case.plan is None:
        yield Check("base weights", SKIPPED, "the config's values make no layout")
    else:
        yield _base(case, case.recipe.model.load, case.plan.layout)


def _base(case: Case, load: str, layout: Layout) -> Check:
    tp, pp, ep = layout.tp, layout.pp, layout.ep
    wanted = f"TP {tp} PP {pp} EP {ep}"
    ranks = list(product(range(tp), range(pp), range(ep)))
    expected = {rank_folder(*rank, pp=pp, ep=ep) for rank in ranks}
    try:
        fix = f"(cd MindSpeed-LLM && CUDA_DEVICE_MAX_CONNECTIONS=1 {shlex.join(conversion(case))})"
    except ConfigError as error:
        first = "First a layout that can exist, above; the base weights are converted for it"
        fix = str(error) if case.legal else first
    try:
        written = (Path(load) / TRACKER).read_text().strip()
    except OSError:
        return Check("base weights", FAILED, f"no {TRACKER} in {load}: not converted yet", fix)
    folder = Path(load) / (
        f"iter_{int(written):07d}" if written.isdigit() else written
    )  # else "release"
    files = {path.parent.name: path for path in folder.glob("mp_rank_*/model_optim_rng.pt")}
    if files.keys() != expected:
        interrupted = ", or a conversion that was interrupted (it writes the tracker first)"
        why = "another layout" + ("" if files.keys() - expected else interrupted)
        return Check(
            "base weights",
            FAILED,
            f"{load} has {_range(files)}; {wanted} needs {_range(expected)}: {why}",
            f"{fix}\nA directory holds one layout: for two, give actor_config.load a name of its "
            "own",
        )
    if pointers := [path.parent.name for path in files.values() if is_pointer(path)]:
        return Check(
            "base weights",
            FAILED,
            f"{len(pointers)} of {len(files)} files are pointers of git-lfs, not weights",
            f"(cd {quoted(load)} && git lfs pull)",
        )
    if cut := sorted(name for name, path in files.items() if not is_zipfile(path)):
        return Check(
            "base weights",
            FAILED,
            f"{cut[0]}/model_optim_rng.pt is not whole: a conversion or copy that was interrupted",
            fix,
        )
    sizes = {name: path.stat().st_size for name, path in files.items()}
    shares = {
        rank_folder(*rank, pp=pp, ep=ep): BF16 * sum(training_weights(case.plan, rank[1]))
        for rank in ranks
    }
    if case.legal and (
        small := sorted(name for name, size in sizes.items() if size < NEARLY * shares[name])
    ):
        return Check(
            "base weights",
            FAILED,
            f"{small[0]}/model_optim_rng.pt has {gigabytes(sizes[small[0]])}"
            f"{', and others too' * (len(small) > 1)}; a rank's share of this model is "
            f"{gigabytes(shares[small[0]])}: weights of another model?",
            fix,
        )
    size = sum(sizes.values())
    return Check(
        "base weights",
        PASSED,
        f"{len(files)} of {len(expected)} files for {wanted}, {gigabytes(size)}",
    )


def _range(folders: Iterable[str]) -> str:
    """Rank folders in words: "16 files, mp_rank_00_000 to mp_rank_00_015"."""
    names = sorted(folders)
    shown = " to ".join(dict.fromkeys([names[0], names[-1]])) if names else ""
    return f"{len(names)} file{'s' * (len(names) != 1)}" + (f", {shown}" if shown else "")
