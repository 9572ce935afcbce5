"""The config: its keys, its layout and memory; and what the model that it names is said to be."""

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.preflight.case import Case, Check, Question, failed, gigabytes, passed, skipped

# Keys of files that have checks of their own.
FILES = ("megatron_training.data_path", "task.test_file", "task.train_file")


def keys(case: Case) -> Iterator[Check]:
    """Yields what the engine's own check says, but for the layout, the model and the files, which
    have lines of their own.
    """
    faults = [fault for fault in case.faults if not _has_own_line(fault, case)]
    for fault in faults:
        yield failed(fault.message, fault.fix, fault.key or fault.rule)
    if not faults:
        yield passed(f"accepted by engine {case.recipe.engine}")


def _has_own_line(fault: Fault, case: Case) -> bool:
    if fault.rule == "layout":
        return case.upstream and case.plan is not None
    return fault.rule == "model" or fault.key in FILES


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
    rows = case.plan.vllm_rows
    return failed(
        "padded_vocab_size is left out: Megatron would take the tokenizer's own number of tokens, "
        f"and vLLM's embedding has {rows:,} rows",
        f"++model.{name}.padded_vocab_size={rows}    # an override of the config",
    )


ROWS = [
    Question(
        "keys and values",
        "Does the engine accept the config?",
        keys,
        "Change the config, or override the key on the command line",
        "model_given",
        refused=True,
    ),
    Question(
        "layout",
        "Does the layout keep upstream's rules?",
        layout,
        "python tools/plan_layout.py --config-name NAME    # the nearest layouts that are legal",
        "upstream_rules",
        refused=True,
    ),
    Question(
        "memory of an NPU",
        "Does the estimate fit into the smallest die?",
        memory,
        "python tools/plan_layout.py --config-name NAME --memory-gb GB    # every part, and "
        "what else fits",
        "upstream legal",
    ),
]

MODEL = [
    Question(
        "config.json",
        "Is there a readable config.json, and does it describe the model that Megatron is told of?",
        config_json,
        "Put the Hugging Face model that the YAML describes there, or: export MODELS=DIR    "
        "# the folder that it is in",
        "model_given",
        refused=True,
    ),
    Question(
        "vocabulary",
        "Is padded_vocab_size set?",
        vocabulary,
        "++model.NAME.padded_vocab_size=N    # an override of the config",
        "upstream",
    ),
]
