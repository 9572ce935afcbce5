"""Our verifier beside verl's GSM8K score and math-verify: the same responses, one process, one run.

    python benchmarks/verifier.py [--responses 10000] [--data ../shared/data/gsm8k] [--verl PATH]

Responses are made from GSM8K's own solutions (from generated sums where the data is absent) in the
shapes that models produce; each is right or wrong by construction, so that beside agreement the
table shows who is wrong. Needs the dev extras verl and math-verify; verl is not imported as a
package (that pulls in its engines), its one file is loaded by path: the installed one, or PATH, a
checkout's verl/utils/reward_score/gsm8k.py.
"""

import argparse
import importlib.util
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

from rich.console import Console
from rich.table import Column, Table

from mindspeed_qerl.tasks.gsm8k.convert import gold_answer
from mindspeed_qerl.tasks.gsm8k.verifier import score_batch

REPO = Path(__file__).resolve().parents[1]
Scorer = Callable[[Sequence[str], Sequence[str]], list[float]]
FILLER = (
    "We can check this by reading the problem once more and following every step from the start. "
)


@dataclass(frozen=True)
class Response:
    shape: str
    text: str
    gold: str
    right: bool  # the number that the response means is the gold number


# {body} the reasoning, {n} the answer, {d} another number, {big} the answer with thousands
# separators, {filler} long text.
SHAPES = {
    "#### n": "{body}\n#### {n}",
    "#### n.": "{body}\n#### {n}.",
    "#### n.0": "{body}\n#### {n}.0",
    "#### $n": "{body}\n#### ${n}",
    "####n": "{body}\n####{n}",
    "#### 1,000": "{body}\n#### {big}",
    "#### **n**": "{body}\n#### **{n}**",
    "#### n dollars": "{body}\n#### {n} dollars",
    "#### n%": "{body}\n#### {n}%",
    "#### n, then 480 characters": "{body}\n#### {n}\n{filler}",
    "long, #### n": "{filler}{filler}{filler}{body}\n#### {n}",
    "#### d+e = n": "{body}\n#### {d} + {rest} = {n}",
    "#### d, corrected to #### n": "{body}\n#### {d}\n\nWait, that is not right.\n#### {n}",
    "#### n, then another problem": "{body}\n#### {n}\n\nQ: Ann has {d} pens. How many pens does "
    "she have?\nA: #### {d}",
    "hedging: #### n or d": "{body}\n#### {n} or {d}",
    "The answer is n.": "{body} The answer is {n}.",
    "The answer is **$n**.": "{body}\nThe answer is **${big}**.",
    "The answer is n, then numbers": "{body} The answer is {n}, as {d} is what we started from.",
    "**Answer:** n": "{body}\n\n**Answer:** {n} in {d} days",
    "A: n": "{body}\nA: {n}",
    r"\boxed{n}": "{body}\n\\[\n\\boxed{{{n}}}\n\\]",
    r"\boxed{n \text{ dollars}}": "{body}\n\\[\n\\boxed{{{n} \\text{{ dollars}}}}\n\\]",
    r"\boxed{1{,}000}": "{body}\nso $\\boxed{{{latex}}}$.",
    "So the total is n.": "{body}\nSo the total is {n}.",
    "no answer, no number": "I am not sure how to solve this problem.",
    "cut off": "{cut}",
}
NEVER_RIGHT = {"hedging: #### n or d", "no answer, no number", "cut off"}


def solutions_from(folder: Path) -> list[str]:
    """GSM8K's solutions, or solutions of generated sums if `folder` is not there."""
    if folder.is_dir():
        return [
            json.loads(line)["answer"]
            for split in ("train", "test")
            for line in open(folder / f"{split}.jsonl", "rb")
        ]
    rng = random.Random(0)
    pairs = [(rng.randint(2, 2000), rng.randint(2, 2000)) for _ in range(2000)]
    return [f"There are {a} and {b} more, so {a}+{b} = {a + b}.\n#### {a + b}" for a, b in pairs]


def make_responses(solutions: list[str], count: int) -> list[Response]:
    """`count` responses, each shape as often as another, 6 of 10 with the gold number; the same in
    every run.
    """
    rng = random.Random(0)
    responses = []
    for index in range(count):
        shape = list(SHAPES)[index % len(SHAPES)]
        solution = rng.choice(solutions)
        gold = gold_answer(solution)
        body = re.sub(r"<<.*?>>", "", solution.rpartition("####")[0]).strip()
        wrong = rng.choice([int(gold) + 1, int(gold) * 10, int(gold) - 10, -int(gold) or 1])
        n = int(gold) if rng.random() < 0.6 else wrong
        d = n + rng.randint(1, 9)
        text = SHAPES[shape].format(
            body=body,
            n=n,
            d=d,
            rest=n - d,
            big=f"{n:,}",
            latex=f"{n:,}".replace(",", "{,}"),
            filler=(FILLER * 6)[:480],
            cut=body[: len(body) // 3].rsplit(" ", 1)[0],
        )
        responses.append(Response(shape, text, gold, n == int(gold) and shape not in NEVER_RIGHT))
    return responses


def load_verl_score(file: Path | None) -> Callable[[str, str, str], float]:
    if file is None:
        spec = importlib.util.find_spec("verl")  # finds the package, does not run it
        if spec is None:
            sys.exit(
                "verl is not installed: pip install --no-deps verl==0.9.1 (the dev extra has it), "
                "or give --verl"
            )
        file = Path(spec.submodule_search_locations[0]) / "utils" / "reward_score" / "gsm8k.py"
    file_spec = importlib.util.spec_from_file_location("verl_gsm8k", file)
    module = importlib.util.module_from_spec(file_spec)
    file_spec.loader.exec_module(module)
    return module.compute_score


def scorers(verl: Callable[[str, str, str], float]) -> dict[str, Scorer]:
    """Those whose speed is compared: name -> function of (texts, golds) -> list of 0.0 or 1.0."""
    return {
        "ours strict": lambda texts, golds: score_batch(texts, golds, method="strict"),
        "verl strict": lambda texts, golds: [
            float(verl(text, gold, "strict")) for text, gold in zip(texts, golds)
        ],
        "ours flexible": lambda texts, golds: score_batch(texts, golds),
        "verl flexible": lambda texts, golds: [
            float(verl(*pair, "flexible")) for pair in zip(texts, golds)
        ],
    }


def math_verify() -> dict[str, Scorer]:
    try:
        from math_verify import parse, verify
    except ImportError:
        sys.exit("math-verify is not installed: pip install math-verify (it is in the dev extra)")
    return {
        "math-verify": lambda texts, golds: [
            float(verify(parse(gold), parse(text))) for text, gold in zip(texts, golds)
        ]
    }


def kinds_of_answers(solutions: list[str]) -> dict[str, list[tuple[str, str]]]:
    """name -> (response, gold number) of some hundreds each, and of few long ones."""
    golds = [gold_answer(solution) for solution in solutions]
    prose = "\n".join(solutions).replace("####", "so it is")
    no_number = str.maketrans("", "", "0123456789")
    long = prose[:1000] * 1000
    return {
        "GSM8K's own solutions": list(zip(solutions, golds)),
        "no number": [(text.translate(no_number), gold) for text, gold in zip(solutions, golds)],
        "1 MB, #### at the end": [(f"{long}\n#### 72", "72")] * 8,
        "1 MB, no form": [(long, "72")] * 8,
    }


def microseconds(scorer: Scorer, pairs: list[tuple[str, str]]) -> float:
    """Processor time of an answer, the best of five rounds."""
    texts, golds = zip(*pairs)
    best = math.inf
    for _ in range(5):
        start = time.process_time()
        scorer(texts, golds)
        best = min(best, (time.process_time() - start) / len(texts) * 1e6)
    return best


def compare_speed(solutions: list[str], compared: dict[str, Scorer], console: Console) -> None:
    title = "processor time of an answer, microseconds (verl reads its last 300 characters)"
    table = Table(Column("answers", no_wrap=True), *compared, title=title)
    for kind, pairs in kinds_of_answers(solutions).items():
        times = [f"{microseconds(scorer, pairs):,.1f}" for scorer in compared.values()]
        table.add_row(kind, *times)
    console.print(table, markup=False)


def compare_verdicts(
    responses: list[Response], compared: dict[str, Scorer], console: Console
) -> None:
    texts = [response.text for response in responses]
    golds = [response.gold for response in responses]
    verdicts = {}
    columns = ("verifier", "responses/s", "yes", "yes, but wrong", "no, but right")
    caption = "of processor time; strict ones say no to right answers in other forms on purpose"
    table = Table(*columns, title="speed, and mistakes", caption=caption)
    for name, scorer in compared.items():
        scorer(texts[:100], golds[:100])  # warm up
        start = time.process_time()
        given = verdicts[name] = scorer(texts, golds)
        speed = len(texts) / (time.process_time() - start)
        false_yes = sum(v == 1 and not r.right for v, r in zip(given, responses))
        false_no = sum(v == 0 and r.right for v, r in zip(given, responses))
        table.add_row(name, f"{speed:,.0f}", f"{int(sum(given)):,}", str(false_yes), str(false_no))
    console.print(table)

    title = "mistakes by shape (a dot is none)"
    table = Table("shape", "responses", "right", *verdicts, title=title)
    for shape in SHAPES:
        chosen = [index for index, response in enumerate(responses) if response.shape == shape]
        mistakes = []
        for given in verdicts.values():
            count = sum(given[i] != responses[i].right for i in chosen)
            mistakes.append(str(count) if count else ".")
        right = sum(responses[i].right for i in chosen)
        table.add_row(shape, str(len(chosen)), str(right), *mistakes)
    console.print(table, markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--responses", type=int, default=10_000, help="how many responses (default 10000)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=REPO.parent / "shared" / "data" / "gsm8k",
        help="folder of GSM8K jsonl",
    )
    parser.add_argument(
        "--verl", type=Path, metavar="PATH", help="verl's gsm8k.py (default: the installed one)"
    )
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    source = args.data if args.data.is_dir() else "generated sums (no GSM8K at --data)"
    solutions, compared = solutions_from(args.data), scorers(load_verl_score(args.verl))
    responses = make_responses(solutions, args.responses)
    console.print(
        f"{len(responses):,} responses in {len(SHAPES)} shapes from {source}, "
        f"{sum(r.right for r in responses):,} of them right, "
        f"{statistics.mean(len(r.text) for r in responses):.0f} characters on average",
        markup=False,
    )
    compare_speed(solutions, compared, console)
    compare_verdicts(responses, {**compared, **math_verify()}, console)


if __name__ == "__main__":
    main()
