"""The verifier against a reader by character (reader.py), on made-up answers and on ones of a
megabyte.
"""

import json
import random
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_qerl.tasks.gsm8k.verifier import METHODS, extract_answer, score
from tests import GSM8K, needs_gsm8k
from tests.tasks.gsm8k.reader import read
from tests.tasks.gsm8k.tables import plain

MARKERS = plain(
    r"####¦#### ¦##### ¦\boxed{¦The answer is ¦answer: ¦**Answer:** ¦ANSWER IS: ¦anſwer is ¦"
    r"answer İs ¦xanswer: ¦åanswer is ¦A: ¦QA: ¦a: "
).split("¦")
SPACES = [" ", "  ", "\n", "\t", "\u00a0", "\u2009", "\u3000", "\x85", " " * 17]
BEHIND = plain(r"%¦ dollars¦½¦kg¦ or ¦and¦ to ¦x¦\times ¦ cdot 2¦=¦:¦~¦.¦,¦so ").split("¦")
MARKS = plain(r"*¦**¦_¦`¦(¦)¦}¦\text{¦\mathbf{¦\!¦,\!¦{,}¦\¦\ud800¦\U0001d7d9¦\u0000").split("¦")
SIGNS, CURRENCIES = (
    ["", "", "-", "+", "\u2212", "\u2013", "--", "- "],
    ["", "", "$", "\\$", "€", "$-"],
)
MIDDLES = [".", ",", "..", "/", "e", "E-", "²", "\uff17", "\0"]
digits = st.text("0123456789", min_size=1, max_size=5)
grouped = st.integers(0, 10**9).map("{:,}".format)
bare = st.one_of(
    digits,
    grouped,
    st.builds(str.replace, grouped, st.just(","), st.sampled_from([" ", "{,}", ",\\!"])),
    st.builds("{}{}{}".format, digits, st.sampled_from(MIDDLES), digits),
    digits.map(".{}".format),
    digits.map(lambda text: "".join(chr(0xFF10 + int(char)) for char in text)),
    st.integers(60, 70).map("9".__mul__),
    st.builds("\\{}frac{{{}}}{{{}}}".format, st.sampled_from(["", "d", "t", "x"]), digits, digits),
)
numbers = st.builds("{}{}{}".format, st.sampled_from(SIGNS), st.sampled_from(CURRENCIES), bare)
pieces = st.one_of(numbers, *map(st.sampled_from, (MARKERS, SPACES, BEHIND, MARKS)))
texts = st.one_of(st.lists(pieces, max_size=12).map("".join), st.text(max_size=30))


def assert_read_alike(text):
    for method in METHODS:
        answer, expected = extract_answer(text, method), read(text, method)
        assert (None if answer is None else Fraction(answer)) == expected, (method, text[:500])


@given(texts)
@example("an\u017fwer is 5, 6")
@example("answer \u0130s 5, 6")
@example("#### 12 thou\u017fand")
@example("12 m\u0131ll\u0130on hundred\u017f 5")
@settings(max_examples=100, deadline=None)
def test_any_answer(text):
    assert_read_alike(text)


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


@pytest.mark.parametrize("count", [600, pytest.param(10**6, marks=pytest.mark.full)])
def test_answers_of_the_grammar(count):
    """Many are read: a reader that reads nothing would agree with itself."""
    rng, read_ones = random.Random(count), 0
    for _ in range(count):
        text = made_answer(rng)
        assert_read_alike(text)
        read_ones += extract_answer(text) is not None
    assert read_ones > count / 4


@needs_gsm8k
def test_answers_to_gsm8k():
    """Its own solutions, said in other ways: right, wrong, hedged, without a number, cut off."""
    for line in (GSM8K / "test.jsonl").read_bytes().splitlines()[::200]:
        solution = json.loads(line)["answer"]
        body, _, gold = solution.rpartition("#### ")
        wrong = str(int(gold.replace(",", "")) + 1)
        for text in (
            solution,
            f"{body}#### {wrong}",
            f"{body}####${gold}.00",
            f"{body}The answer is **{gold}** so",
            f"{body}\\boxed{{{gold}}}",
            f"{body}#### {gold} or {wrong}",
            body,
            body[: len(body) // 3],
            body.translate({ord(char): "" for char in "0123456789"}),
            f"{body}\u2019\u00d7 A: {wrong}",
        ):
            assert_read_alike(text)
            assert score(text, gold) == float(read(text, "flexible") == int(gold.replace(",", "")))


UNITS = plain(
    r"9¦9,¦1,000,¦.¦1.¦1/¦1e¦#¦#### ¦#### 1¦#### 1 or ¦\boxed{¦\boxed{1¦\frac{1¦\frac{1}{¦"
    r"the answer is ¦answer:¦answer*¦anſwer¦A:¦A: 1¦-¦1-¦$¦\$¦*¦#### **¦ ¦⇥¦\u2212¦⏎¦1 000 ¦"
    r"#### 1 000¦7²¦\uff17¦x\u2019¦{,}¦,\!¦\ud800"
).split("¦")
CASES = [
    *product(UNITS, ["", "#### 1", "\\frac{1"], [1000]),
    *(pytest.param(unit, "", 10**6, marks=pytest.mark.full) for unit in UNITS),
]


@pytest.mark.parametrize("unit, start, length", CASES)
def test_long_answers(unit, start, length):
    assert_read_alike(start + unit * (length // len(unit)) + " 5 z")
