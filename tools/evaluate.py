"""Evaluate a model on a task with vLLM: greedily, and with several samples.

    python tools/evaluate.py --run runs/grpo_tiny_moe_cpu/2026-11-21_14-03-59_seed1            the last checkpoint, as the run evaluates
    python tools/evaluate.py --model models/Qwen2.5-7B-Instruct --data data/gsm8k/test_chat.parquet --output evaluations/base
    python tools/evaluate.py --model ... --adapter DIR --data ... --output ...                  a PEFT adapter

Says accuracy (of your own verifier: the mean score) with its 95% interval, pass@k (the best of k), how many answers were cut off, and for
GSM8K's verifiers maj@k and which rule found how many; writes every answer (mindspeed_qerl/local/evaluate.py names the files). There is no noise. Adapters are merged into a temporary copy of the model, which takes its
size in the temporary directory (TMPDIR). A run's evaluations lie in RUN/evaluations/NAME, where compare_runs.py --evaluation NAME finds them.
"""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.entry import use_checkout

    use_checkout()

from mindspeed_qerl.local.evaluate import Evaluation, evaluate, of_run
from mindspeed_qerl.recipe.types import HARDWARE_ERRORS
from mindspeed_qerl.tasks.gsm8k.verifier import RULES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="exit status: 0 evaluated, 1 bad input or output, 2 wrong arguments")
    what = parser.add_argument_group("what (with --run the rest is as in its config)")
    what.add_argument("--run", metavar="DIR", help="a run directory; its checkpoint is evaluated")
    what.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the last one); 0: the model before training")
    what.add_argument("--model", metavar="DIR", help="a Hugging Face model")
    what.add_argument("--adapter", metavar="DIR", help="a PEFT adapter for it")
    what.add_argument("--data", metavar="FILE", help="rows of a task (docs/own_task.md; GSM8K: tools/convert_gsm8k.py)")
    what.add_argument("--output", type=Path, metavar="DIR", help="folder to make (with --run: RUN/evaluations/NAME)")
    what.add_argument("--name", metavar="NAME", help="with --run (default: step<N>)")
    how = parser.add_argument_group("how")
    how.add_argument("--samples", type=int, metavar="K", help="answers per question for pass@K and maj@K; 0: greedy only (default: 4)")
    how.add_argument("--temperature", type=float, help="of the samples (default: 1)")
    how.add_argument("--problems", type=int, metavar="N", help="the first N questions (default: all)")
    how.add_argument("--verifier", help="gsm8k, gsm8k_strict, or your own module:function (default: gsm8k)")
    how.add_argument("--prompt", choices=("chat", "plain"), help="default: chat")
    how.add_argument("--max-tokens", type=int, help="length limit of an answer (default: 1024)")
    how.add_argument("--max-prompt-length", type=int, help="tokens; longer questions are left out (default: 512)")
    how.add_argument("--max-num-seqs", type=int, help="answers that vLLM writes at a time (default: 256)")
    how.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16")
    how.add_argument("--kv-cache-gib", type=int, help="vLLM's memory for keys and values on a CPU (default: 4)")
    how.add_argument("--tensor-parallel-size", type=int, help="default: 1")
    how.add_argument("--seed", type=int, help="of the samples (default: 1)")
    hardware = parser.add_argument_group("as other hardware would answer (docs/hardware_error.md)")
    hardware.add_argument("--hardware-error", nargs="+", choices=HARDWARE_ERRORS, metavar="KIND", help=", ".join(HARDWARE_ERRORS) + " (default: the run's hardware_error.evaluation)")
    hardware.add_argument("--gaussian-std", type=float, help="default: 0.05")
    hardware.add_argument("--block", type=int, help="default: 64")
    args = vars(parser.parse_args())
    run, output, name, kinds, std, block = (args.pop(key) for key in ("run", "output", "name", "hardware_error", "gaussian_std", "block"))
    given = {key: value for key, value in args.items() if value is not None}
    if run is None and not (given.keys() >= {"model", "data"} and output) or run is not None and (output or "adapter" in given):
        parser.error("give --run, or --model, --data and --output (a run's evaluations lie in it, and its adapters are its own)")
    if run is None and (name or "step" in given):
        parser.error("--name and --step go with --run")
    sizes = {key: value for key, value in (("gaussian_std", std), ("block", block)) if value is not None}
    if sizes and not kinds:
        parser.error("--gaussian-std and --block go with --hardware-error")
    if kinds:
        given["hardware_error"] = {"kinds": kinds, "gaussian_std": 0.05, "block": 64} | sizes
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        evaluation = of_run(run, **given) if run else Evaluation(**given)
        if not Path(evaluation.model).is_dir():
            raise FileNotFoundError(f"{evaluation.model} is no directory: give the folder of a Hugging Face model")
        if run:
            output = Path(run) / "evaluations" / (name or f"step{evaluation.step}")
        summary = evaluate(evaluation, output, lambda line: print(line, flush=True))
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    _print(summary)
    print(f"\n{output}: summary.json, answers.jsonl")
    return 0


def _print(summary: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = {key: summary[key] for key in ("greedy", "sampled") if key in summary}
    questions, name = next(iter(columns.values()))["n_problems"], "/".join(Path(summary["data"]).parts[-2:])
    table = Table("", *columns, title=f"{name}, {questions:,} questions, verifier {summary['verifier']}", title_justify="left")

    def row(label: str, of) -> None:
        if any(cells := [of(numbers) for numbers in columns.values()]):
            table.add_row(label, *cells)

    row("accuracy (pass@1) [95 %]", lambda numbers: f"{numbers['accuracy']:.3f} [{numbers['interval_low']:.3f}, {numbers['interval_high']:.3f}]")
    for kind, meaning in (("pass", "best of k"), ("maj", "majority right")):
        row(f"{kind}@k, {meaning}", lambda numbers, kind=kind: next((f"{value:.3f} (k = {key.partition('@')[2]})" for key, value in numbers.items()
                                                                  if key.startswith(f"{kind}@")), ""))
    row("cut off", lambda numbers: f"{numbers['truncated_fraction']:.1%}")
    for rule in RULES:
        row(f"found by {rule}" if rule != "none" else "no answer found", lambda numbers, rule=rule: f"{numbers[f'rule/{rule}']:.1%}"
            if f"rule/{rule}" in numbers else "")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
