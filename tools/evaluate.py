"""Evaluate a model on a task with vLLM: greedily, and with several samples.

    python tools/evaluate.py --run RUN_DIR                           its last checkpoint
    python tools/evaluate.py --model DIR --data FILE --output DIR    a model

Says accuracy (of your own verifier: the mean score) with its 95% interval, pass@k (the best of k),
how many answers were cut off, for our own verifiers maj@k, and for GSM8K's which rule found how many;
writes every answer (mindspeed_qerl/local/evaluate.py names the files). There is no noise. Adapters are
merged into a temporary copy of the model, which takes its size in the temporary directory (TMPDIR).
A run's evaluations lie in RUN/evaluations/NAME, where compare_runs.py --evaluation NAME finds them.
"""

import argparse
import os
import sys
import warnings
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from pydantic import ValidationError

from mindspeed_qerl.common.entry import json_object
from mindspeed_qerl.local.evaluate import EvaluationJob, evaluate, of_run
from mindspeed_qerl.recipe.features import (
    HARDWARE_ERRORS,
    ROLLOUT_FORMATS,
    HardwareError,
    Quantization,
)
from mindspeed_qerl.runs.directory import NAME, NAME_RULE
from mindspeed_qerl.tasks.gsm8k.verifier import RULES

# the fields of EvaluationJob that have an option: what it is, and argparse's arguments
OPTIONS: dict[str, tuple[str, dict]] = {
    "model": ("a Hugging Face model", {"metavar": "DIR"}),
    "data": (
        "rows of a task (docs/own_task.md; GSM8K: tools/convert_gsm8k.py)",
        {"metavar": "FILE"},
    ),
    "step": (
        "of the checkpoint (default: the last one); 0: the model before training",
        {"type": int, "metavar": "N"},
    ),
    "prompt": ("form of the prompts", {"choices": ("chat", "plain")}),
    "chat_template_kwargs": (
        "variables of the chat template, such as '{\"enable_thinking\": false}'",
        {"type": json_object, "metavar": "JSON"},
    ),
    "verifier": ("gsm8k, gsm8k_strict, math, or your own module:function", {}),
    "problems": ("the first N questions (default: all)", {"type": int, "metavar": "N"}),
    "samples": (
        "answers per question for pass@K and maj@K; 0: greedy only",
        {"type": int, "metavar": "K"},
    ),
    "temperature": ("of the samples", {"type": float}),
    "max_tokens": ("length limit of an answer", {"type": int}),
    "max_prompt_length": ("tokens; longer questions are left out", {"type": int}),
    "max_num_seqs": ("answers that vLLM writes at a time", {"type": int}),
    "dtype": ("of the model", {"choices": ("bfloat16", "float16", "float32")}),
    "kv_cache_gib": ("vLLM's memory for keys and values on a CPU", {"type": int}),
    "tensor_parallel_size": ("processes that share the model", {"type": int}),
    "seed": ("of the samples", {"type": int}),
    "emulate_npu": (
        "serve with vllm-ascend on emulated NPUs (docs/architecture.md); default: as the run did",
        {"action": argparse.BooleanOptionalAction},
    ),
}


BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 evaluated, 1 bad input or output, 2 wrong arguments",
    )
    what = parser.add_argument_group("what (with --run the rest is as in its config)")
    how = parser.add_argument_group("how")
    quantized = parser.add_argument_group("with quantized linear layers (docs/quantization.md)")
    hardware = parser.add_argument_group("as other hardware would answer (docs/quantization.md)")
    what.add_argument("--run", metavar="DIR", help="a run directory; its checkpoint is evaluated")
    what.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to make (with --run: RUN/evaluations/NAME)",
    )
    what.add_argument("--name", metavar="NAME", help="with --run (default: step<N>)")
    defaults = {each.name: each.default for each in fields(EvaluationJob)}
    for name, (help, arguments) in OPTIONS.items():
        if defaults[name] not in (None, MISSING, False):
            help = f"{help} (default: {defaults[name]})"
        group = what if name in ("model", "data", "step") else how
        group.add_argument(f"--{name.replace('_', '-')}", help=help, **arguments)
    quantized.add_argument(
        "--quantization",
        choices=ROLLOUT_FORMATS,
        help="default: that of the run, if rollout_quantization.evaluation is set",
    )
    hardware.add_argument(
        "--hardware-error",
        nargs="+",
        choices=HARDWARE_ERRORS,
        metavar="KIND",
        help=", ".join(HARDWARE_ERRORS) + " (default: the run's hardware_error.evaluation)",
    )
    hardware.add_argument("--gaussian-std", type=float, help="default: 0.05")
    hardware.add_argument("--block", type=int, help="default: 64")
    args = vars(parser.parse_args())
    run, output, name, kinds, std, block, format = map(
        args.pop,
        ("run", "output", "name", "hardware_error", "gaussian_std", "block", "quantization"),
    )
    given = {key: value for key, value in args.items() if value is not None}
    complete = given.keys() >= {"model", "data"} and output
    if run is None and not complete or run is not None and output:
        parser.error("give --run, or --model, --data and --output (a run's evaluations lie in it)")
    if run is None and (name or "step" in given):
        parser.error("--name and --step go with --run")
    sizes = {
        key: value for key, value in (("gaussian_std", std), ("block", block)) if value is not None
    }
    if sizes and not kinds:
        parser.error("--gaussian-std and --block go with --hardware-error")
    if format:
        given["quantization"] = None if format == "none" else Quantization(format)
    # what torch and vLLM say of themselves while they start: no Triton, a deprecated operator,
    # where memory is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_LOGS", "-all")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    if name and not NAME.fullmatch(name):
        parser.error(f"--name {name}: {NAME_RULE}")
    try:
        if kinds:
            hardware = HardwareError(evaluation=tuple(kinds), **sizes)
            given["hardware_error"] = hardware.arguments("evaluation")
        evaluation = of_run(run, **given) if run else EvaluationJob(**given)
        if not Path(evaluation.model).is_dir():
            raise FileNotFoundError(
                f"{evaluation.model} is no directory: give the folder of a Hugging Face model"
            )
        if run:
            output = Path(run) / "evaluations" / (name or f"step{evaluation.step}")
        summary = evaluate(evaluation, output, lambda line: print(line, flush=True))
    except ValidationError as error:
        parser.error("; ".join(map(words_of, error.errors())))
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    _print(summary)
    print(f"\n{output}: summary.json, answers.jsonl")
    return 0


def words_of(fault: Any) -> str:
    """A value out of its range, as pydantic describes it, in the words of the command line."""
    name, given = fault["loc"][0], fault.get("ctx", {})
    bounds = [f"{word} {given[key]:g}" for key, word in BOUNDS.items() if key in given]
    greedy = " (greedy answers alone: --samples 0)" if name == "temperature" else ""
    option = f"--{name.replace('_', '-')} {fault['input']}"
    return f"{option}: must be {' and '.join(bounds) or 'a finite number'}{greedy}"


def _print(summary: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {key: summary[key] for key in ("greedy", "sampled") if key in summary}
    questions, name = (
        next(iter(columns.values()))["n_problems"],
        "/".join(Path(summary["data"]).parts[-2:]),
    )
    title = f"{name}, {questions:,} questions, verifier {summary['verifier']}"
    table = Table("", *columns, title=title, title_justify="left")

    def row(label: str, of) -> None:
        if any(cells := [of(numbers) for numbers in columns.values()]):
            table.add_row(label, *cells)

    def at_k(kind: str, numbers: dict) -> str:
        return next(
            (
                f"{value:.3f} (k = {key.partition('@')[2]})"
                for key, value in numbers.items()
                if key.startswith(f"{kind}@")
            ),
            "",
        )

    row(
        "accuracy (pass@1) [95 %]",
        lambda of: f"{of['accuracy']:.3f} [{of['interval_low']:.3f}, {of['interval_high']:.3f}]",
    )
    row("pass@k, best of k", partial(at_k, "pass"))
    row("maj@k, majority right", partial(at_k, "maj"))
    row("not computed, counted as 0", lambda of: f"{of.get('not_computed') or ''}")
    row("cut off", lambda of: f"{of['truncated_fraction']:.1%}")
    for rule in RULES:
        label = f"found by {rule}" if rule != "none" else "no answer found"
        row(label, lambda of, key=f"rule/{rule}": f"{of[key]:.1%}" if key in of else "")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(quietly(main))
