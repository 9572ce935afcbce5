"""The config; room for a run's files on disks and in memory; and what it reads: the model's files,
training and test data, and the base weights in Megatron's format.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import is_zipfile

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import TRACKER, rank_folders
from mindspeed_qerl.families.checkpoint import whole_files
from mindspeed_qerl.families.fingerprint import is_pointer
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import ADAMW, BF16, adapter_weights
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.layout.sizes import Weights, model_parameters, training_weights
from mindspeed_qerl.tasks.checks import check_rows
from mindspeed_qerl.tasks.packed import read_packed, read_packed_rows
from mindspeed_qerl.tasks.rows import read_rows

from .case import (
    Case,
    Check,
    Question,
    conversion,
    enough,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)

CONVERT = "python tools/convert_gsm8k.py --input openai/gsm8k --output "
# bytes of a rank's process without weights: assumed for Python, torch, CANN, vLLM; never measured
PROCESS = 4 * 10**9
NEARLY = 0.95  # of a computed size: what is below it is another file
# Keys of files that have checks of their own.
FILES = ("megatron_training.data_path", "task.test_file", "task.train_file")


def keys(case: Case) -> Iterator[Check]:
    """Yields what the engine's own check says, but for the layout, the model and the files, which
    have lines of their own.
    """
    lines = ("model",) if case.plan is None else ("model", "layout")
    faults = [each for each in case.faults if each.rule not in lines and each.key not in FILES]
    for fault in faults:
        yield failed(fault.message, fault.fix, fault.key or fault.rule)
    if not faults:
        yield passed(f"accepted by engine {case.recipe.engine}")


def layout(case: Case) -> Iterator[Check]:
    """Checks upstream's rules for layout and batch, training and rollout."""
    if case.plan is None:
        yield skipped("the values above make no layout")
        return
    for rule in broken(case.plan):
        yield failed(rule.message, name=rule.rule.replace("_", " "))
    if case.legal:
        plan = case.plan.layout
        yield passed(
            f"legal: TP {plan.tp} PP {plan.pp} EP {plan.ep} DP {plan.dp}, vLLM TP {plan.infer_tp} "
            f"EP {plan.infer_ep}"
        )


def memory(case: Case) -> Check:
    """The estimate of layout/memory.py, against the smallest die's: 64 GB, or less by npu-smi (a
    910B4, a slice).
    """
    assert case.legal
    settings = settings_of(case.recipe)
    sizes = [die.total * 2**20 / 1e9 for die in case.seen.dies]
    smallest = min([settings.memory_gb, *sizes])
    held = estimate(case.legal, replace(settings, memory_gb=smallest))
    die = "the smallest die has" if sizes else "a die is assumed to have"
    words = f"{die} {gigabytes(smallest * 1e9)}; estimated, never measured: "
    if held.fits:
        return passed(f"{words}at most {gigabytes(held.peak)} outside the rollout")
    return failed(words + "; ".join(held.faults))


def config_json(case: Case) -> Check:
    """Checks whether config.json is there, can be built, and describes the model that Megatron is
    told of.
    """
    fixes = {fault.message: fault.fix for fault in case.faults if fault.rule == "model"}
    if fixes:
        return failed("; ".join(fixes), "\n".join(filter(None, fixes.values())))
    return passed("it can be built, and the config agrees with it")


def vocabulary(case: Case) -> Check | None:
    """Without padded_vocab_size Megatron takes the tokenizer's own number of tokens (Megatron-LM
    tokenizer.py:103).
    """
    if case.recipe.npu.padded_vocab_size is not None or case.plan is None:
        return None
    name = case.recipe.model.arguments.get("model")
    return failed(
        "padded_vocab_size is left out: Megatron would take the tokenizer's own number of tokens, "
        f"and vLLM's embedding has {case.plan.vllm_rows:,} rows",
        f"++model.{name}.padded_vocab_size={case.plan.vllm_rows}    # an override of the config",
    )


# ---- room ----


def rank_files(plan: Plan, weights: Callable[..., Weights] = training_weights) -> dict[str, int]:
    """Bytes of the weights, 16 bits each, in each rank's file of a checkpoint, by its folder;
    `weights` counts those of one rank of a plan's stage.
    """
    layout = plan.layout
    folders = rank_folders(layout.tp, layout.pp, layout.ep)
    return {
        folder: BF16 * sum(weights(plan, stage=stage)) for (_, stage, _), folder in folders.items()
    }


def run_disk(case: Case) -> Check:
    """Room for the run's checkpoints. Sizes are computed: 2 bytes a weight, and 12 of AdamW for
    each one that is trained, in every rank's file.
    """
    run = case.recipe.run
    plan = case.legal
    assert plan
    files = rank_files(plan)
    if plan.lora:
        files = rank_files(plan, partial(adapter_weights, settings=settings_of(case.recipe)))
    size = sum(files.values())
    if not case.recipe.npu.no_save_optim:
        size += ADAMW * size // BF16
    saves = max(1, run.train_iters // (run.save_interval or run.train_iters))
    free = case.machine.disk(run.root).free
    return enough(
        free,
        size,
        size * saves,
        f"about {gigabytes(size * saves)} needed ({saves} x {gigabytes(size)}), "
        f"{gigabytes(free)} free for {run.root}",
    )


def base_disk(case: Case) -> Check:
    """Room for the converted base weights."""
    load = case.recipe.model.load
    plan = case.legal
    assert load and plan
    if not case.machine.writable(load):
        return failed(f"{load} cannot be written: the base weights are converted into it")
    size = sum(rank_files(plan).values())
    free = case.machine.disk(load).free
    words = f"about {gigabytes(size)} needed, {gigabytes(free)} free for {load}"
    return enough(free, size, size, words)


def host_memory(case: Case) -> Check:
    """Compares what processes of this machine can still have with what its ranks load at once.
    Every rank reads its whole file before its weights go to the die
    (megatron/training/checkpointing.py, torch.load).
    """
    plan = case.legal
    free, limit = case.machine.memory()
    assert plan
    sizes = rank_files(plan).values()
    files = sum(sizes) * case.ranks // len(sizes)
    need = files + case.ranks * PROCESS
    return enough(
        free,
        files,
        need,
        f"{case.ranks} ranks load {gigabytes(files)} of base weights at once; with "
        f"{gigabytes(PROCESS)} assumed for each process about {gigabytes(need)}. "
        f"{gigabytes(free)} are left ({limit})",
    )


# ---- files ----


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
    """All files that the model's index names, of the size of this model: failed while the
    conversion of the base weights reads them, else a warning.
    """
    folder = Path(case.recipe.model.path)
    verdict = failed if case.base_to_convert else warning
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


def training_files(case: Case) -> Check:
    """Checks the packed files that upstream's trainer reads. It keeps prompts that are shorter than
    max_prompt_length (indexed_dataset.py:545).
    """
    recipe = case.recipe
    prefix = recipe.task.data_path
    fix = f"{CONVERT}{shlex.quote(str(Path(prefix).parent))} --format mindspeed --tokenizer "
    fix += f"{recipe.model.path} --max-prompt-length {recipe.sampling.max_prompt_length}"
    try:
        lengths, tokens = read_packed(f"{prefix}_packed_input_ids_document")
        labels, _ = read_packed(f"{prefix}_packed_labels_document")
    except FileNotFoundError as error:
        return failed(f"no file {error.filename}", fix)
    except (OSError, ValueError) as error:
        return failed(str(error), fix)
    if len(lengths) != len(labels):
        return failed(f"{len(lengths):,} prompts and {len(labels):,} labels", fix)
    empty = int((labels == 0).sum())
    if empty:
        words = f"{empty:,} of {len(labels):,} labels are empty: nothing to verify against"
        return failed(words, fix)
    vocabulary = recipe.npu.padded_vocab_size
    largest = int(tokens.max(initial=0))
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


def rows(case: Case) -> Check:
    """Checks the rows that are trained on and tested with, as a run does (tasks/checks.py); the
    former are those kept beside a packed file, or the training file's, which NPUs do not read.
    """
    task = case.recipe.task
    fix = f"{CONVERT}{shlex.quote(str(Path(task.test_file).parent))}"
    try:
        test = read_rows(task.test_file)
        train = read_packed_rows(task.data_path) or []
        if not train and Path(task.train_file).is_file():
            train = read_rows(task.train_file)
    except (OSError, ValueError) as error:
        return failed(str(error), fix)
    found = check_rows(train, test, task)
    if found.faults:
        words = [fault.message for fault in found.faults]
        return failed("; ".join(words), "\n".join(fault.fix for fault in found.faults))
    if found.warnings:
        return warning("; ".join(found.warnings), "Convert the data again, unless it is meant")
    counts = f"{len(train):,} training rows, {len(test):,} test rows"
    packed = 0
    with suppress(OSError, ValueError):  # `training_files` says it
        packed = len(read_packed(f"{task.data_path}_packed_input_ids_document")[0])
    if train and packed not in (0, len(train)):
        verdict = failed if packed == len(test) else warning
        return verdict(f"{packed:,} packed prompts, {counts}: they are not of one conversion", fix)
    return passed(f"{counts}, no question in both")


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
    paths = (Path(load) / iteration).glob("mp_rank_*/model_optim_rng.pt")
    files = {path.parent.name: path for path in paths}
    shares = rank_files(plan)
    layout = plan.layout
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


CONFIG = [
    Question(
        "keys and values",
        keys,
        "Change the config, or override the key on the command line",
        refused=True,
    ),
    Question(
        "layout",
        layout,
        "python tools/plan_layout.py --config-name NAME    # the rules and their lines upstream",
        refused=True,
    ),
    Question(
        "memory of an NPU",
        memory,
        "python tools/plan_layout.py --config-name NAME --memory-gb GB    # every part, and what "
        "else fits",
        "legal",
    ),
]
ROOM = [
    Question(
        "host memory",
        host_memory,
        "Raise the container's --memory, end what holds the memory (ps -eo pid,rss,args --sort "
        "-rss | head), or use fewer ranks here",
        "legal",
    ),
    Question(
        "disk for the run",
        run_disk,
        "run.root=DIR, or a larger megatron_training.save_interval    # overrides of the config",
        "legal",
    ),
    Question(
        "disk for the base",
        base_disk,
        "actor_config.load=DIR    # an override of the config",
        "base_to_convert legal",
    ),
]
MODEL = [
    Question(
        "config.json",
        config_json,
        "Put the Hugging Face model that the YAML describes there, or: export MODELS=DIR    # the "
        "folder that it is in",
        refused=True,
    ),
    Question("vocabulary", vocabulary),
    Question(
        "tokenizer",
        tokenizer,
        "Download the model's whole directory (git lfs pull)\n"
        "Take an instruct or chat model, or add its chat_template.jinja",
    ),
    Question("weights", weights, "Download the model's whole directory (git lfs pull)", "plan"),
]
DATA = [Question("training files", training_files), Question("test rows", rows)]
CHECKPOINTS = [
    Question(
        "base weights",
        base_weights,
        "The conversion: python tools/preflight.py --config-name NAME --print-conversion",
        "plan",
    )
]
