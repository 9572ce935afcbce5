"""The files that a run reads: training and test data, and the base weights in Megatron's format."""

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from zipfile import is_zipfile

from mindspeed_qerl.ascend.convert import conversion_command
from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.files import TRACKER, rank_folder
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check, gigabytes
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.tasks.packed import read_packed


def training_data(machine: Machine, case: Case) -> Iterator[Check]:
    """The packed files that upstream's trainer reads: prompts and labels, as many of both, and how many prompts are
    too long."""
    if not case.upstream:
        yield from _converted("training rows", case.recipe.task.train_file)
        return
    data_path = case.recipe.task.data_path
    limit = case.recipe.sampling.max_prompt_length
    fix = (f"python tools/convert_gsm8k.py --input openai/gsm8k --output {Path(data_path).parent} --format mindspeed "
            f"--tokenizer {case.model_dir} --max-prompt-length {limit}")
    try:
        (lengths, tokens), (label_lengths,
                            _) = (read_packed(f"{data_path}_packed_{column}_document")
                                  for column in ("input_ids", "labels"))
    except (OSError, ValueError) as error:
        missing = absent(error.filename) if isinstance(error, FileNotFoundError) else str(error)
        yield Check("training files", FAILED, missing, fix)
        return
    if len(lengths) != len(label_lengths):
        yield Check("training files", FAILED, f"{len(lengths):,} prompts and {len(label_lengths):,} labels", fix)
        return
    empty = int((label_lengths == 0).sum())
    if empty:
        yield Check("labels", FAILED, f"{empty:,} of {len(lengths):,} are empty: nothing to verify against", fix)
    else:
        yield Check("training files", PASSED, f"{len(lengths):,} prompts and labels")
    batch = case.recipe.batch.global_batch_size
    kept, longest = int((lengths < limit).sum()), int(lengths.max(initial=0))  # indexed_dataset.py:545
    if kept == len(lengths):
        yield Check("prompt lengths", PASSED, f"at most {longest} tokens; max_prompt_length is {limit}")
    else:
        state = FAILED if kept < batch else WARNING
        few = f", fewer than one batch of {batch}" if state == FAILED else ""
        yield Check("prompt lengths", state, f"{len(lengths) - kept:,} of {len(lengths):,} have max_prompt_length = "
                    f"{limit} tokens or more and are left out{few}", f"rl_config.max_prompt_length={longest + 1}    # "
                    "an override; seq_length and max_model_len must hold it")
    vocabulary = case.recipe.npu.padded_vocab_size
    if vocabulary and tokens.max(initial=0) >= vocabulary:
        yield Check("token ids", FAILED, f"up to {tokens.max()}, and the model's vocabulary has {vocabulary:,}: "
                    "another model's tokenizer", fix)
    else:
        yield Check("token ids", PASSED,
                    f"up to {tokens.max(initial=0):,}" + (f" of a vocabulary of {vocabulary:,}" if vocabulary else ""))


def test_data(machine: Machine, case: Case) -> Iterator[Check]:
    yield from _converted("test rows", case.recipe.task.test_file)


def absent(file: str) -> str:
    return f"no {Path(file).name} in {Path(file).parent}"


def _converted(name: str, file: str) -> Iterator[Check]:
    from mindspeed_qerl.tasks.rows import read_rows

    try:
        rows = read_rows(file)
    except (OSError, ValueError) as error:
        yield Check(name, FAILED, absent(file) if isinstance(error, FileNotFoundError) else str(error),
                    f"python tools/convert_gsm8k.py --input openai/gsm8k --output {Path(file).parent}")
        return
    yield Check(name, PASSED, f"{len(rows):,} in {Path(file).name}, each with a prompt and an answer")


def conversion(case: Case) -> list[str]:
    """The command that converts the base weights, as words.

    Raises:
        ConfigError: the layout breaks a rule, `load` is named after another one, or there is no such command.
    """
    if case.plan is None:
        raise ConfigError("\n".join(case.unread or case.faults))
    if not case.recipe.model.load:
        return conversion_command(case.recipe)  # says so
    rules = [rule.message for rule in broken(case.plan)]
    if rules:
        raise ConfigError(f"no conversion for a layout that cannot exist: {'; '.join(rules)}. The nearest that can: "
                          f"python tools/plan_layout.py --config-name {case.name}, with the same overrides")
    load, it = case.recipe.model.load, case.plan.layout
    named = re.search(r"-tp(\d+)-pp(\d+)(?:-ep(\d+))?/*$", load)
    if named and any(size and int(size) != wanted for size, wanted in zip(named.groups(), (it.tp, it.pp, it.ep))):
        own = f"{load[:named.start()]}-tp{it.tp}-pp{it.pp}" + (f"-ep{it.ep}" if named[3] else "")
        raise ConfigError(f"actor_config.load = {load} is named after another layout than the config's TP {it.tp} PP "
                          f"{it.pp} EP {it.ep}, and a folder holds the weights of one: set actor_config.load={own}")
    return conversion_command(case.recipe)


def base_checkpoint(machine: Machine, case: Case) -> Iterator[Check]:
    """The base weights in Megatron's format: one file for each tensor, pipeline and expert rank of this layout."""
    if not case.upstream or case.recipe.rehearsal.enabled:
        yield Check("base weights", SKIPPED,
                    "a rehearsal's model has its own" if case.recipe.rehearsal.enabled else "this engine reads the "
                    "Hugging Face files")
        return
    load = case.recipe.model.load
    if not load:
        yield Check("base weights", WARNING, "actor_config.load is not set: random weights are trained",
                    "actor_config.load=DIR")
        return
    if case.plan is None:
        yield Check("base weights", SKIPPED, "the config's values make no layout")
        return
    tp, pp, ep = case.plan.layout.tp, case.plan.layout.pp, case.plan.layout.ep
    wanted = f"TP {tp} PP {pp} EP {ep}"
    expected = {rank_folder(*rank, pp=pp, ep=ep) for rank in product(range(tp), range(pp), range(ep))}
    try:
        fix = f"(cd MindSpeed-LLM && CUDA_DEVICE_MAX_CONNECTIONS=1 {shlex.join(conversion(case))})"
    except ConfigError as error:
        first = "First a layout that can exist, above; the base weights are converted for it"
        fix = str(error) if case.legal else first
    try:
        written = (Path(load) / TRACKER).read_text().strip()
    except OSError:
        yield Check("base weights", FAILED, f"no {TRACKER} in {load}: not converted yet", fix)
        return
    folder = Path(load) / (f"iter_{int(written):07d}" if written.isdigit() else written)  # else "release"
    files = {path.parent.name: path for path in folder.glob("mp_rank_*/model_optim_rng.pt")}
    cut = sorted(name for name, path in files.items() if not is_zipfile(path))
    if files.keys() != expected:
        why = "another layout"
        if not files.keys() - expected:
            why += ", or a conversion that was interrupted (it writes the tracker first)"
        yield Check("base weights", FAILED, f"{load} has {_range(files)}; {wanted} needs {_range(expected)}: {why}",
                    f"{fix}\nA directory holds one layout: for two, give actor_config.load a name of its own")
    elif cut:
        yield Check("base weights", FAILED,
                    f"{cut[0]}/model_optim_rng.pt is not whole: a conversion or copy that was interrupted", fix)
    else:
        size = sum(path.stat().st_size for path in files.values())
        yield Check("base weights", PASSED, f"{len(files)} of {len(expected)} files for {wanted}, {gigabytes(size)}")


def _range(folders: Iterable[str]) -> str:
    """Rank folders in words: "16 files, mp_rank_00_000 to mp_rank_00_015"."""
    names = sorted(folders)
    shown = " to ".join(dict.fromkeys([names[0], names[-1]])) if names else ""
    return f"{len(names)} file{'s' * (len(names) != 1)}" + (f", {shown}" if shown else "")
