"""The verifier against hand-made verdicts, all gold answers of GSM8K, and formulations that share
no code with it.
"""

import hashlib
import json
import random
import subprocess
import sys
from decimal import Decimal
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mindspeed_qerl.tasks.gsm8k.convert import gold_answer
from mindspeed_qerl.tasks.gsm8k.verifier import (
    METHODS,
    VERIFIERS,
    canonical_number,
    extract_answer,
    score,
    score_batch,
)
from tests import GSM8K, ROOT, needs_gsm8k
from tests.tables import cells, plain


def rows_of(table):
    """(response, gold, strict, flexible) of each line."""
    return [
        (text, gold, int(strict), int(flexible)) for text, gold, strict, flexible in cells(table)
    ]


# Response ¦ gold ¦ strict ¦ flexible: the table of docs/verifier.md, where the reasons are.
FIELD_TABLE = rows_of(rf"""
#### 72. ¦ 72 ¦ 1 ¦ 1
#### 72.0 ¦ 72 ¦ 1 ¦ 1
#### $72 ¦ 72 ¦ 1 ¦ 1
####72 ¦ 72 ¦ 1 ¦ 1
#### 1,000 ¦ 1000 ¦ 1 ¦ 1
#### **72** ¦ 72 ¦ 1 ¦ 1
#### 10 ... #### 72 ¦ 72 ¦ 0 ¦ 1
#### 10⏎⏎Wait, that is wrong.⏎#### 72 ¦ 72 ¦ 0 ¦ 1
The answer is 72. ¦ 72 ¦ 0 ¦ 1
#### 72{" and so on" * 48} ¦ 72 ¦ 1 ¦ 1
#### 72⏎{"as shown. " * 48} ¦ 72 ¦ 1 ¦ 1
#### -5 ¦ -5 ¦ 1 ¦ 1
#### 50% ¦ 50 ¦ 1 ¦ 1
#### 72 dollars ¦ 72 ¦ 1 ¦ 1
#### 72 or 73 ¦ 72 ¦ 0 ¦ 0
#### 72. 48 of them in May ¦ 72 ¦ 0 ¦ 1
#### 10\,000 ¦ 10000 ¦ 1 ¦ 1
#### 3\frac{{1}}{{2}} ¦ 3 ¦ 0 ¦ 0
#### 2 million ¦ 2 ¦ 0 ¦ 0
#### 48 + 24 = 72 ¦ 72 ¦ 0 ¦ 1
""")
# What stands behind "#### " ¦ gold ¦ strict ¦ flexible.
NUMBERS = rows_of(r"""
72 ¦ 73 ¦ 0 ¦ 0
-72 ¦ 72 ¦ 0 ¦ 0
+72 ¦ 72 ¦ 1 ¦ 1
\u221272 ¦ -72 ¦ 1 ¦ 1
\u221272 ¦ 72 ¦ 0 ¦ 0
\u201372 ¦ -72 ¦ 1 ¦ 1
-$72 ¦ -72 ¦ 1 ¦ 1
$-72 ¦ -72 ¦ 1 ¦ 1
\$72 ¦ 72 ¦ 1 ¦ 1
€1,000.50 ¦ 1000.5 ¦ 1 ¦ 1
1{,}000 ¦ 1000 ¦ 1 ¦ 1
1,\!000 ¦ 1000 ¦ 1 ¦ 1
1,000, ¦ 1000 ¦ 1 ¦ 1
1,00 ¦ 100 ¦ 0 ¦ 0
1,0000 ¦ 10000 ¦ 0 ¦ 0
1.2.3 ¦ 1.2 ¦ 0 ¦ 0
72,50 ¦ 7250 ¦ 0 ¦ 0
.5 ¦ 0.5 ¦ 1 ¦ 1
0.50 ¦ 0.5 ¦ 1 ¦ 1
50% ¦ 0.5 ¦ 0 ¦ 0
007 ¦ 7 ¦ 1 ¦ 1
-0 ¦ 0 ¦ 1 ¦ 1
72kg ¦ 72 ¦ 1 ¦ 1
72 (48 + 24) ¦ 72 ¦ 0 ¦ 1
72. 48 of them in April ¦ 72 ¦ 0 ¦ 1
72 \text{ m}^2 ¦ 72 ¦ 1 ¦ 1
`72` ¦ 72 ¦ 1 ¦ 1
$72$ ¦ 72 ¦ 1 ¦ 1
\(72\) ¦ 72 ¦ 1 ¦ 1
\boxed{72} ¦ 72 ¦ 1 ¦ 1
\u00a0 ⇥72 ¦ 72 ¦ 1 ¦ 1
3/4 ¦ 0.75 ¦ 1 ¦ 1
\frac{3}{4} ¦ 0.75 ¦ 1 ¦ 1
72/3 ¦ 72 ¦ 0 ¦ 0
72/0 ¦ 72 ¦ 0 ¦ 0
72e0 ¦ 72 ¦ 0 ¦ 0
7.2e1 ¦ 72 ¦ 0 ¦ 0
1e999999999 ¦ 1 ¦ 0 ¦ 0
72   or   73 ¦ 72 ¦ 0 ¦ 0
72, 73 ¦ 72 ¦ 0 ¦ 0
72 - 73 ¦ 72 ¦ 0 ¦ 0
72 73 ¦ 72 ¦ 0 ¦ 0
10:30 ¦ 10 ¦ 0 ¦ 0
3 1/2 ¦ 3 ¦ 0 ¦ 0
48+24 ¦ 48 ¦ 0 ¦ 0
48 \times 2 ¦ 48 ¦ 0 ¦ 0
72 dollars or more ¦ 72 ¦ 1 ¦ 1
7² ¦ 7 ¦ 0 ¦ 0
7² ¦ 49 ¦ 0 ¦ 0
7² = 49 ¦ 49 ¦ 0 ¦ 1
7½ ¦ 7 ¦ 0 ¦ 0
72\u2070 ¦ 72 ¦ 0 ¦ 0
72\u0663 ¦ 723 ¦ 1 ¦ 1
\uff17\uff12 ¦ 72 ¦ 1 ¦ 1
72 m² ¦ 72 ¦ 1 ¦ 1
72m² ¦ 72 ¦ 1 ¦ 1
1 000 ¦ 1000 ¦ 1 ¦ 1
1 000 ¦ 0 ¦ 0 ¦ 0
1 000 ¦ 1 ¦ 0 ¦ 0
1\u202f000 ¦ 1000 ¦ 1 ¦ 1
-$12 345 678.50 in all ¦ -12345678.5 ¦ 1 ¦ 1
1 000. 48 of them ¦ 1000 ¦ 0 ¦ 1
1 0000 ¦ 10000 ¦ 0 ¦ 0
1 000 5 ¦ 1000 ¦ 0 ¦ 0
1 000.5.6 ¦ 1000.5 ¦ 0 ¦ 0
1 000² ¦ 1000 ¦ 0 ¦ 0
1 000 or 2 000 ¦ 1000 ¦ 0 ¦ 0
about 72 ¦ 72 ¦ 0 ¦ 1
72 apples or 73 apples ¦ 72 ¦ 0 ¦ 1
72 (or 73) ¦ 72 ¦ 0 ¦ 0
72 (or 73) ¦ 73 ¦ 0 ¦ 1
10k in 5 boxes ¦ 5 ¦ 0 ¦ 0
$5m ¦ 5 ¦ 0 ¦ 0
72 m^{2} ¦ 72 ¦ 1 ¦ 1
72 $m$^2 ¦ 72 ¦ 1 ¦ 1
(72)^2 ¦ 72 ¦ 0 ¦ 0
72\pi ¦ 72 ¦ 0 ¦ 0
72^\circ ¦ 72 ¦ 1 ¦ 1
72✅ ¦ 72 ¦ 0 ¦ 0
72 ✅ ¦ 72 ¦ 1 ¦ 1
0x48 ¦ 0 ¦ 0 ¦ 0
0x48 ¦ 48 ¦ 0 ¦ 0
10:30 ¦ 30 ¦ 0 ¦ 0
12/25/2024 ¦ 2024 ¦ 0 ¦ 0
72 dozens ¦ 864 ¦ 1 ¦ 1
2 million 5 hundred ¦ 500 ¦ 0 ¦ 0
2 hundred thousand ¦ 200 ¦ 0 ¦ 0
3 and a half ¦ 3 ¦ 0 ¦ 0
3 and 1/2 ¦ 0.5 ¦ 0 ¦ 0
⏎72 ¦ 72 ¦ 0 ¦ 1
""")
FORMS = rows_of(r"""
no number at all ¦ 0 ¦ 0 ¦ 0
### 72 ¦ 72 ¦ 0 ¦ 1
##### 72 ¦ 72 ¦ 1 ¦ 1
#### 72⏎⏎#### 72.0 ¦ 72 ¦ 1 ¦ 1
#### 72 or 73⏎#### 72 ¦ 72 ¦ 0 ¦ 1
#### Step 1⏎add⏎#### 72 ¦ 72 ¦ 1 ¦ 1
#### 1. Add⏎48+24⏎#### 72 ¦ 72 ¦ 0 ¦ 1
The answer is 10.⏎#### 48 + 24 = 72 ¦ 72 ¦ 0 ¦ 1
#### 72 and in all 10 boxes ¦ 72 ¦ 0 ¦ 1
#### 72⏎The answer is 10, \boxed{11}, A: 12, 13 ¦ 72 ¦ 1 ¦ 1
\boxed{72} The answer is 10. 11 ¦ 72 ¦ 0 ¦ 1
\boxed{10} or rather \boxed{72} ¦ 72 ¦ 0 ¦ 1
$\boxed{\$1{,}000 \text{ dollars}}$ ¦ 1000 ¦ 0 ¦ 1
\boxed{\text{72}} 10 ¦ 72 ¦ 0 ¦ 1
The answer is 72. A: 10. 11 ¦ 72 ¦ 0 ¦ 1
The final answer is: **$72**, from 48 and 24 ¦ 72 ¦ 0 ¦ 1
**Answer:** 72 (of 100) ¦ 72 ¦ 0 ¦ 1
**Answer**: 72 (of 100) ¦ 72 ¦ 0 ¦ 1
ANSWER IS -72 of 100 ¦ -72 ¦ 0 ¦ 1
The answer is 48 + 24 = 72. ¦ 72 ¦ 0 ¦ 1
The answer is not 10 but 72 ¦ 72 ¦ 0 ¦ 1
A: 72 of 100 ¦ 72 ¦ 0 ¦ 1
QA: 10 of 72 ¦ 72 ¦ 0 ¦ 1
So 48 + 24 = 72. ¦ 72 ¦ 0 ¦ 1
48+24=72 clips ¦ 72 ¦ 0 ¦ 1
from 100-72 ¦ 72 ¦ 0 ¦ 1
it is -72 ¦ -72 ¦ 0 ¦ 1
the 10\u201372 range ¦ 72 ¦ 0 ¦ 1
H2O and 1,2,3 ¦ 3 ¦ 0 ¦ 0
so 5 ... ¦ 5 ¦ 0 ¦ 1
...5 ¦ 5 ¦ 0 ¦ 1
\boxed{1 000} of 72 ¦ 1000 ¦ 0 ¦ 1
The answer is 3 500 dollars ¦ 3500 ¦ 0 ¦ 1
a square of 7² ¦ 7 ¦ 0 ¦ 0
10 m² and 72 m² ¦ 72 ¦ 0 ¦ 1
the total is 1 000 ¦ 1000 ¦ 0 ¦ 1
the area is 72 m^2⏎in cm^2 ¦ 72 ¦ 0 ¦ 1
it is \sqrt{72} ¦ 72 ¦ 0 ¦ 0
\boxed{\sqrt{16}} ¦ 16 ¦ 0 ¦ 0
so \binom{9}{2} ¦ 2 ¦ 0 ¦ 0
so 2^{10} ¦ 10 ¦ 0 ¦ 0
so 10{000} ¦ 0 ¦ 0 ¦ 0
<answer>72</answer> ¦ 72 ¦ 0 ¦ 1
答案是72个 ¦ 72 ¦ 0 ¦ 1
""")
NUMBERS.append((" " * 40 + "72", "72", 1, 1))
FORMS += [("", "72", 0, 0), ("72" + " x" * 5000, "72", 0, 1)]


# What people put between groups of three, and what they put behind a number.
GROUPING = plain(
    r",¦\uff0c¦\u066c¦_¦'¦\u2019¦ ¦\u00a0¦\u2007¦\u2009¦\u202f¦{,}¦,\!¦\,¦\;¦\:¦\ ¦\!¦~¦"
    r"\thinspace ¦{\,}¦{ }¦\text{ }¦\text{,}¦\u200b"
).split("¦")
NOT_GROUPING = plain(r"\u00b7¦{}¦`¦\u2063\u2063¦\U0001f600¦:¦^").split("¦")
UNITS = plain(
    r" apples¦kg¦ km¦ kilos¦ m¦ miles¦ months¦ minutes¦ millimetres¦ mm¦ min¦ t¦ Kelvin¦"
    r" boxes¦ bottles¦ tons¦%¦ %¦\%¦ percent¦€¦ °C¦千克¦元¦\text{ cm}¦ \mathrm{kg}¦-inch¦/day¦!¦"
    r"**¦$¦ ✅¦ thousandaires¦ millionaires¦ milligrams¦ millilitres¦ mills¦ milkshakes¦"
    r" miles per hour"
).split("¦")
READ_SCALES = {
    "hundred": 100,
    "Thousand": 1000,
    "lakh": 10**5,
    "lac": 10**5,
    "MILLION": 10**6,
    "crores": 10**7,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
UNREAD_SCALES = plain(
    r"k¦ k¦K¦ K¦M¦ M¦MM¦B¦ bn¦ mln¦ mio¦T¦万¦ млн¦億¦ hundredths¦ thousand million¦ squared¦e3¦"
    r" Millionen¦ milliards¦ millones¦ millón¦ milhões¦ milioni¦ miliardi¦ miljoner¦ milyon¦"
    r" milyar¦ miljard¦ bilhões¦ Tausend¦ hundert¦ tusen¦ duizend¦\u2030¦½¦²¦^2¦ and a half"
).split("¦")
NOT_ALONE = plain(r"72 dollars¦72 73¦3\frac{1}{2}¦10k¦72⏎73¦#### 72¦72 or 73").split("¦")


@pytest.mark.parametrize(
    "form", ["#### {}", "#### **{}**", "\\boxed{{{}}}", "The answer is ${}$.", "so {}"]
)
def test_a_number_is_read_whole_or_not_at_all(form):
    """Against Python's own formatting: the pieces of a number never count as an answer."""

    def answers(written):
        text = form.format(written)
        return {
            extract_answer(text),
            *([extract_answer(text, "strict")] if form.startswith("####") else []),
        }

    for number in (1000, 10000, 123456, 7000000):
        for sign in GROUPING:
            assert answers(f"{number:,}".replace(",", sign)) == {str(number)}, sign
        for sign in NOT_GROUPING:
            assert answers(f"{number:,}".replace(",", sign)) == {None}, sign
    for unit in UNITS:
        assert answers("72" + unit) == {"72"}, unit
    for scale, factor in READ_SCALES.items():
        assert (
            answers("2 " + scale)
            == answers("2-" + scale)
            == answers(f"2 \\text{{ {scale}}}")
            == {str(2 * factor)}
        )
    for scale in UNREAD_SCALES:
        assert answers("2" + scale) == {None}, scale
    for mixed in (
        "3\\frac{1}{2}",
        "3 \\dfrac{1}{2}",
        "3\\frac12",
        "3\u00bd",
        "3 1/2",
        "3 and 1/2",
        "3\u2044\u00bd",
    ):
        assert answers(mixed) == {None}, mixed


@pytest.mark.parametrize(
    "response, gold, strict, flexible",
    FIELD_TABLE + [("#### " + n, *rest) for n, *rest in NUMBERS] + FORMS,
)
def test_verdicts(response, gold, strict, flexible):
    assert score(response, gold, "strict") == strict
    assert score(response, gold) == flexible


def test_docs_table_is_the_tested_table():
    text = (ROOT / "docs" / "verifier.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    documented = [tuple(cell.strip() for cell in row.split("|")[2:4]) for row in rows]
    assert documented == [
        ("yes" if strict else "no", "yes" if flexible else "no")
        for *_, strict, flexible in FIELD_TABLE
    ]


@needs_gsm8k
def test_all_gold_answers_of_gsm8k():
    lines = [
        line
        for split in ("train", "test")
        for line in (GSM8K / f"{split}.jsonl").read_bytes().splitlines()
    ]
    solutions = [json.loads(line)["answer"] for line in lines]
    golds = [gold_answer(solution) for solution in solutions]
    assert len(solutions) == 8792
    for method in METHODS:
        assert sum(score_batch(solutions, golds, method=method)) == 8792
    # A verifier that says yes to everything would pass so far. Beside the next row's gold answer,
    # yes must mean equal.
    for solution, gold, other in zip(solutions, golds, golds[1:]):
        assert score(solution, other) == float(gold == other)


def test_batch_and_names():
    responses, golds = ["#### 72", "The answer is 72", "#### 73"], ["72", "72.0", "72"]
    assert score_batch(responses, golds, method="strict") == [1.0, 0.0, 0.0]
    assert VERIFIERS["gsm8k"](responses, golds) == [1.0, 1.0, 0.0]
    assert VERIFIERS["gsm8k_strict"](responses, golds, [{}] * 3) == [1.0, 0.0, 0.0]
    assert set(VERIFIERS) == {"gsm8k", "gsm8k_strict"}


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: score("72", "72", "lenient"), ["lenient", "strict, flexible"]),
        (lambda: score_batch(["1", "2"], ["1"]), ["2 responses", "1 gold"]),
        (lambda: score("72", "seventy-two"), ["seventy-two", "not a number"]),
        (lambda: score("72", ""), ["not a number"]),
        (lambda: score("72", "1e3"), ["1e3", "not a number"]),
        *(
            (lambda text=text: canonical_number(text), [repr(text)[:9], "not a number"])
            for text in NOT_ALONE
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "written, canonical",
    cells(r"""
1,000 ¦ 1000
 72  ¦ 72
72. ¦ 72
-7 ¦ -7
$7.50 ¦ 7.5
0.05 ¦ 0.05
-.5 ¦ -0.5
10% ¦ 10
10 000 ¦ 10000
10\,000 ¦ 10000
10\u2019000 ¦ 10000
2 million ¦ 2000000
50 \u20ac ¦ 50
\boxed{72} ¦ 72
-0.0 ¦ 0
3/4 ¦ 0.75
1/3 ¦ 1/3
109,200,000 ¦ 109200000
\u22127 ¦ -7
"""),
)
def test_canonical_form(written, canonical):
    assert canonical_number(written) == canonical
    assert extract_answer(f"#### {written}", "strict") == canonical


def test_numbers_are_bounded():
    assert score("#### " + "9" * 64, "9" * 64, "strict") == 1.0
    assert extract_answer("#### " + "9" * 65) is None
    assert extract_answer("7 or " + "9" * 5000) is None  # int() refuses more than 4300 digits


# Each of these is quadratic, or fails, for some plausible way to write the verifier (half a MB of
# each).
HOSTILE_UNITS = plain(
    r"9¦9,¦1,000,¦,¦.¦1.¦1/¦1e¦#¦#### ¦#### 1¦#### 1 or ¦\boxed{¦\boxed{1¦\frac{1¦\frac{1}{¦"
    r"the answer is ¦answer:¦answer*¦A:¦-¦1-¦$¦\$¦*¦#### **¦ ¦⇥¦\u2212¦⏎¦1 000 ¦#### 1 000¦7²"
).split("¦")
HOSTILE_STARTS = ["", "#### ", "#### 1", "\\frac{1"]


@pytest.mark.parametrize(
    "length, limit", [(10**5, 5), pytest.param(5 * 10**5, 60, marks=pytest.mark.full)]
)
def test_any_text_is_read_in_linear_time(length, limit):
    """Quadratic time is 10^10 steps, at least 15 s of processor time; linear time is milliseconds.
    SIGPROF ends the process after `limit` seconds of one text.
    """
    program = (
        "import json, signal, sys\n"
        "from mindspeed_qerl.tasks.gsm8k.verifier import score\n"
        "length, limit, texts = json.loads(sys.argv[1])\n"
        "for start, unit in texts:\n"
        "    signal.setitimer(signal.ITIMER_PROF, limit)\n"
        "    text = start + unit * (length // len(unit)) + 'z'\n"
        "    print(int(score(text, '1', 'strict')), int(score(text, '1')), flush=True)\n"
    )
    texts = [(start, unit) for unit in HOSTILE_UNITS for start in HOSTILE_STARTS]
    texts = [(start, unit) for start, unit in texts if not start or unit in " ,9*\\$"]
    command = [sys.executable, "-c", program, json.dumps([length, limit, texts])]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"slow: {texts[len(lines) :][:1]}, {done.stderr[-500:]}"
    verdicts = dict(zip(texts, lines, strict=True))
    assert verdicts["", "#### 1"] == "1 1"
    assert verdicts["", "9"] == "0 0"
    assert verdicts["#### 1", " "] == "1 1"


# --- against independent formulations
# -------------------------------------------------------------------------------------

decimals = st.decimals(min_value=-(10**12), max_value=10**12, places=3).map(
    lambda d: d + 0
)  # no negative zero


def renderings(number):
    """The same number as people write it, made by Python's own formatting."""
    plain, grouped = f"{abs(number):f}", f"{abs(number):,f}"
    trimmed = grouped.rstrip("0").rstrip(".")
    sign = "-" if number < 0 else ""
    bodies = [
        plain,
        grouped,
        trimmed,
        trimmed + ".",
        "0" + plain,
        "$" + trimmed,
        trimmed + "%",
        trimmed + " boxes",
    ]
    return [sign + body for body in bodies] + [f"**{sign}{trimmed}**"]


frames = st.sampled_from(["#### {}", "\\boxed{{{}}}", "The answer is {}", "A: {}", "so {}"])


@given(decimals, decimals, st.integers(0, 8), st.booleans(), frames)
@example(Decimal(1000), Decimal("1000.001"), 1, False, "#### {}")
def test_equal_means_equal_as_decimals(number, other, style, same, frame):
    gold = number if same else other
    response = "2 + 2 = 4\n" + frame.format(renderings(number)[style])
    assert score(response, f"{gold:f}") == float(number == gold)
    assert score(response, f"{gold:f}", "strict") == float(number == gold and frame == "#### {}")


@given(
    st.lists(
        st.tuples(
            st.integers(-50, 50), st.sampled_from(["", "\nthe rest", "\n\nWait.\n", " dollars\n"])
        ),
        max_size=5,
    )
)
def test_strict_wants_one_value_and_flexible_takes_the_last(statements):
    response = "Some work.\n" + "\n".join(f"#### {number}{after}" for number, after in statements)
    values = [number for number, _ in statements]
    assert extract_answer(response, "strict") == (str(values[0]) if len(set(values)) == 1 else None)
    assert extract_answer(response, "flexible") == (str(values[-1]) if values else None)


@given(
    st.text(
        st.sampled_from("0123456789,.$#-/%e*{}()\\ \n\t:=+\u2212Aanswerisboxdftco"), max_size=80
    )
    | st.text()
)
def test_any_text_gives_a_canonical_number_or_nothing(text):
    for method in METHODS:
        answer = extract_answer(text, method)
        if answer is not None:
            assert canonical_number(answer) == answer
            assert score(text, answer, method) == 1.0


def test_imports_without_any_installed_package():
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from mindspeed_qerl.tasks.gsm8k import "
        "convert, verifier"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(ROOT)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# --- against a reader by character, which shared no code with the verifier (at b58bfff:
# tests/tasks/gsm8k/reader.py): its verdicts, as digests


MARKS = plain(r"*¦**¦_¦`¦(¦)¦}¦\text{¦\mathbf{¦\!¦,\!¦{,}¦\¦\ud800¦\U0001d7d9¦\u0000").split("¦")
SIGNS, CURRENCIES = (
    ["", "", "-", "+", "\u2212", "\u2013", "--", "- "],
    ["", "", "$", "\\$", "€", "$-"],
)

# A grammar of answers: what stands in front, the number in many hands, what touches it, what
# follows.
BODIES = ["", "", "48 + 24 = 72\n", "In 2020, 1 000 of 3 1/2.\n", "#### 72\n", "\u2713 x^2 = 16\n"]
STARTS = plain(
    r"#### ¦####¦#### **¦#### $¦\boxed{¦\boxed{\text{¦The answer is ¦**Answer:** ¦A: ¦= ¦so ¦"
    r"\sqrt{¦\binom{9}{¦x_{¦\u221a¦\u00b1¦\u2248¦#### about ¦("
).split("¦")
GROUPS = plain(
    r",¦ ¦\u00a0¦\u2009¦\u202f¦\u2007¦'¦\u2019¦_¦\u066c¦\uff0c¦{,}¦,\!¦\,¦\;¦\:¦\!¦\ ¦~¦"
    r"\thinspace ¦\text{ }¦{}¦\u200b¦.¦\u00b7¦;¦\u2063¦`¦  "
).split("¦")
BEHINDS = plain(
    r"¦¦.¦%¦\%¦ %¦€¦}¦**¦$¦ dollars¦ km¦ kg¦ miles¦ m¦m¦ months¦ minutes¦k¦ k¦K¦ K¦M¦ M¦m ¦"
    r" bn¦ thousand¦ Million¦-million¦} million¦** hundred¦ lakh¦ crores¦ dozen¦ dozens¦"
    r" dozenth¦ hundredths¦ tenth¦ thousand million¦ Millionen¦ millones¦ milhões¦ milliards¦"
    r" million 5¦ hundred and 5¦ percent¦\u2030¦°¦^\circ¦^2¦^{10}¦ m^2¦ \text{m}^{2}¦ m²¦²¦½¦"
    r" 1/2¦ and 1/2¦ and a half¦\frac{1}{2}¦ \dfrac12¦/7¦/0¦/day¦e5¦e-5¦x8¦\pi¦ π¦\text{ cm}¦"
    r" m$¦\\¦+¦+x¦!¦?¦✅¦ ✅¦个¦万¦千克¦元¦:30¦_8¦_¦ (or ¦ or ¦ to ¦, ¦-¦ = ¦ apples or ¦\times ¦ ($¦"
    r"\u000d¦⏎¦⏎72¦</b>¦ squared¦, so 5 times 3¦. Check: 3¦ (48 + 24)¦ #### ¦⏎#### ¦\ud800¦"
    r"\u0000¦\u0336¦\u3002"
).split("¦")
OTHERS = plain(
    r"1,00,000¦12,34,567¦1,00¦1.2.3¦.5¦3½¦3/4¦\frac{3}{4}¦\frac34¦007¦\frac{x}{4}¦"
    r"\frac{ 3 }{4}¦\u0667\u0662¦\uff17\uff12¦\U0001d7d5\u0662¦1e3¦0x48"
).split("¦")


def spelt(rng):
    """A number in one of the ways it is written."""
    value = rng.choice(
        [
            72,
            5,
            10000,
            1000,
            0,
            123456,
            rng.randrange(10 ** rng.randint(1, 9)),
            10 ** rng.randint(1, 70),
        ]
    )
    kind = rng.randrange(10)
    if kind < 4:
        text = str(value)
    elif kind < 8:
        text = f"{value:,}".replace(",", rng.choice(GROUPS))
    elif kind == 8:
        text = rng.choice(OTHERS)
    else:
        text = str(value) + rng.choice(GROUPS) + str(rng.randrange(1000)).zfill(rng.randint(1, 3))
    text += rng.choice(["", "", "", ".0", ".50", ",5"])
    return rng.choice(SIGNS) + rng.choice(CURRENCIES) + text


def made_answer(rng):
    text = rng.choice(BODIES) + rng.choice(STARTS)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        text += (
            spelt(rng)
            + rng.choice(BEHINDS)
            + rng.choice(["", "", rng.choice(BEHINDS), rng.choice(MARKS)])
        )
    return text


REPEATED = plain(
    r"9¦9,¦1,000,¦.¦1.¦1/¦1e¦#¦#### ¦#### 1¦#### 1 or ¦\boxed{¦\boxed{1¦\frac{1¦\frac{1}{¦"
    r"the answer is ¦answer:¦answer*¦anſwer¦A:¦A: 1¦-¦1-¦$¦\$¦*¦#### **¦ ¦⇥¦\u2212¦⏎¦1 000 ¦"
    r"#### 1 000¦7²¦\uff17¦x\u2019¦{,}¦,\!¦\ud800"
).split("¦")


def digest(texts):
    verdicts = [(extract_answer(text), extract_answer(text, "strict")) for text in texts]
    return hashlib.sha256(repr(verdicts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("seed, verdicts", [(1, "0d009601de04fd59"), (2, "31d6477ed29effe0")])
def test_answers_of_a_grammar_are_read_as_the_reader_read_them(seed, verdicts):
    rng = random.Random(seed)
    assert digest([made_answer(rng) for _ in range(3000)]) == verdicts


def test_long_answers_are_read_as_the_reader_read_them():
    starts = product(REPEATED, ["", "#### 1", "\\frac{1"])
    texts = [start + unit * (1000 // len(unit)) + " 5 z" for unit, start in starts]
    assert digest(texts) == "f281d0a46a03e0f8"
