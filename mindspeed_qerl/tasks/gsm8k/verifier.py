r"""Read the number that a response commits to, and compare it with the gold number exactly.

    >>> score("48 / 2 = 24, 48 + 24 = 72\n#### $72.00", "72", method="strict")
    1.0
    >>> extract_answer(r"so it is \boxed{1{,}000}", "flexible")
    '1000'

An answer is stated by a marker and a number right behind it; only spaces, markup and a currency sign may stand
between.

- `strict` knows one marker, `####`. Several `####` with different numbers are hedging: no answer.
- `flexible` tries `####`, `\boxed{`, "answer is" / "answer:", "A:" in this order and takes the last statement of the
  first form that is there; if there is none, or it cannot be read, the last number of the response. One number is
  read, never a choice of several, so hedging buys nothing.

A statement that goes on into another number (`#### 48+24`, `#### 72 or 73`, `#### 10:30`) states no single number and
is not read. Neither is an unreadable number: badly grouped (`1,00`, `1.2.3`), in exponent notation (`7e1`), with a
superscript, a fraction sign or a foreign digit in it (`7²`, `7½`), or written with more than `MAX_NUMBER_CHARS`
characters. An unreadable number is never replaced by a piece of itself. Behind a marker, groups of three may stand
apart: `#### 1 000` is 1000.

Signs other than a percent or currency sign are part of the number, units are not: 50% = 50, $72 = 72 = 72 kg. `3/4`
and `\frac{3}{4}` are fractions. docs/verifier.md has a table of verdicts beside those of other verifiers.

The whole response is read, in time linear in its length: every repetition in the patterns below is bounded, or runs
over characters that nothing next to it can also match, and no number is parsed before its length is known. As a
rule only its end meets a pattern: words are looked for first, and what stands before them is not matched.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import gcd

Ratio = tuple[int, int]  # a number as numerator and denominator in lowest terms: a Fraction is compared much slower

METHODS = ("strict", "flexible")
MAX_NUMBER_CHARS = 64  # digits, commas and the point, as written

# Superscripts, fractions and digits of other scripts become this, which makes the number they stand in unreadable. One
# ASCII character, since a class that holds others is slower to search for.
_ODD = "\0"
_FULL_WIDTH = {chr(0xff10 + digit): str(digit) for digit in range(10)}
_DIGITS = "0123456789" + "".join(_FULL_WIDTH)
_CHARACTERS = str.maketrans(
    {chr(code): _ODD for code in range(128, 0x10000) if unicodedata.category(chr(code)) in ("Nd", "No")}
    | _FULL_WIDTH
    | dict.fromkeys("\u2212\u2010\u2011\u2013\uff0d\ufe63", "-")  # minus, hyphens, en dash, full-width and small minus
    | dict.fromkeys("\u00a0\u2009\u202f", " ")  # no-break and thin spaces
)
_RUN = rf"(?:(?<![\w.])\.)?[0-9][0-9,.{_ODD}]*"  # all the digits, commas and points that stand together
_SPACED = rf"[0-9]{{1,3}}(?: [0-9]{{3}})++[0-9,.{_ODD}]*"
# A minus behind a word, a number or a closing bracket is a subtraction or a hyphen, not a sign.
_NUMBER = (
    r"(?P<sign>(?<![\w)\]}%])[-+])?(?:\\?[$€£¥])?"
    rf"(?:\\[dt]?frac\{{(?P<over>{_RUN})\}}\{{(?P<under>{_RUN})\}}"
    rf"|(?P<run>{_RUN})(?:/(?P<divisor>{_RUN}))?(?P<exponent>[eE][-+]?[0-9]+)?)"
)
_MARKUP = r"(?:[ *_`\"'$€£¥({]|\\[$(\[,;!]|\\(?:boxed|text|textbf|mathbf|mathrm)\{){0,16}"
_STATED = _MARKUP + _NUMBER.replace("(?P<run>", f"(?P<run>{_SPACED}|")

_ANY_NUMBER = re.compile(_NUMBER)  # holds no space


def _find(literal: str, character: str, text: str) -> int:
    """Where `literal` stands first, -1 if nowhere. Most responses lack its rare `character`, which is found faster."""
    return -1 if text.find(character) < 0 else text.find(literal)


def _find_answer(text: str) -> int:
    """Where "answer" stands first, in letters that `re.IGNORECASE` takes for these (U+017F is an s); -1 if nowhere."""
    return text.replace("\u017f", "s").encode("ascii", "replace").lower().find(b"answer")


_FORMS = {  # where each can stand first, and the pattern
    "####": (partial(_find, "####", "#"), re.compile("####" + _STATED)),
    "\\boxed": (partial(_find, "\\boxed{", "\\"), re.compile(r"\\boxed\{" + _STATED)),
    # the letter before the word boundary: searched much faster
    "answer is": (_find_answer, re.compile(r"[aA](?<!\w[aA])(?i:nswer[*_]{0,2}(?: is:?| ?:))" + _STATED)),
    "A:": (partial(_find, "A:", ":"), re.compile(r"A:(?<!\wA:)" + _STATED)),
}
RULES = (*_FORMS, "last number", "none")  # how an answer can be found, strongest first
_CONTINUES = re.compile(  # another number stands right behind, or behind an operator or a conjunction
    r"(?: |[*_$%)}\\]{0,8} ?(?:[-+*/×÷^=:;~&|<>]|\\?(?:times|div|cdot)|x|or|and|to) ?[-*_$({\\]{0,8})[0-9]"
)
_SPACES = re.compile("  +")
_CHANGED = re.compile(f"[{''.join(map(chr, _CHARACTERS))}]+")
_WELL_FORMED = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]*)(?:\.[0-9]+)?")


def extract_answer(text: str, method: str = "flexible") -> str | None:
    """The number that `text` commits to in canonical form ("1,000.50" -> "1000.5"), or None if it states none.

    ValueError for an unknown `method`.
    """
    return extract_with_rule(text, method)[0]


def extract_with_rule(text: str, method: str = "flexible") -> tuple[str | None, str]:
    """What `extract_answer` returns, and which of `RULES` found it ("none" when it is None)."""
    value, rule = _extract(text, method)
    return (None, "none") if value is None else (_canonical(value), rule)


def score(response: str, gold: str, method: str = "flexible") -> float:
    """1.0 if `response` commits to a number equal to `gold` ("72", "1,000", "-7"), else 0.0.

    ValueError for an unknown `method`, and for a `gold` that is not one number.
    """
    return float(_extract(response, method)[0] == _read_number(gold))


def score_batch(responses: Sequence[str], golds: Sequence[str], rows: Sequence[dict] = (), *,
                method: str = "flexible") -> list[float]:
    """`score` of each response against the gold number beside it; `rows` is unused, every reward is called with them.

    ValueError if responses and gold answers are not equally many.
    """
    if len(responses) != len(golds):
        raise ValueError(f"{len(responses)} responses but {len(golds)} gold answers: give one for each response")
    return [score(response, gold, method) for response, gold in zip(responses, golds)]


METHOD_OF_VERIFIER = {"gsm8k": "flexible", "gsm8k_strict": "strict"}
VERIFIERS: dict[str, Callable[..., list[float]]] = {
    name: partial(score_batch, method=method) for name, method in METHOD_OF_VERIFIER.items()}


def canonical_number(text: str) -> str:
    """`text`, which must be one number and nothing else, in canonical form: "1,000" -> "1000", "$7.50" -> "7.5".

    ValueError if it is anything else.
    """
    return _canonical(_read_number(text))


def _read_number(text: str) -> Ratio:
    match = _ANY_NUMBER.fullmatch(_normalise(str(text)).strip())
    value = _value(match) if match else None
    if value is None:
        raise ValueError(
            f"not a number: {str(text)[:80]!r}; write the gold answer as digits, such as '72', '-7' or '1,000.5'")
    return value


def _extract(text: str, method: str) -> tuple[Ratio | None, str]:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    if method == "strict":
        find, form = _FORMS["####"]
        start = find(text)
        stated = {_stated_value(match) for match in form.finditer(_normalised_from(start, text))} if start >= 0 else ()
        return (stated.pop() if len(stated) == 1 else None), "####"
    for rule, (find, form) in _FORMS.items():
        start = find(text)
        last = _last(form, _normalised_from(start, text)) if start >= 0 else None
        if last is not None:
            value = _stated_value(last)
            if value is not None:
                return value, rule
            break  # an equation such as "#### 48+24=72": its result is the last number
    return _last_number(text), "last number"


def _normalised_from(start: int, text: str) -> str:
    """What stands at `start` and behind, with the character before it, at which a form looks."""
    return _normalise(text[max(start - 1, 0):])


def _normalise(text: str) -> str:
    """One kind of minus, single spaces, and plain commas for LaTeX's `{,}` and `,\\!`."""
    if not text.isascii():
        text = _CHANGED.sub(lambda run: run[0].translate(_CHARACTERS), text)
    text = text.replace("\t", " ")
    if "  " in text:
        text = _SPACES.sub(" ", text)
    if "\\" in text or "{,}" in text:
        text = text.replace("{,}", ",").replace(",\\!", ",")
    return text


def _last_number(text: str) -> Ratio | None:
    """The value of the last match of `_ANY_NUMBER`: it is in the word with the last digit."""
    digit = max(map(text.rfind, "0123456789" if text.isascii() else _DIGITS))
    if digit < 0:
        return None
    start, end = text.rfind(" ", 0, digit) + 1, text.find(" ", digit)
    return _value(_last(_ANY_NUMBER, _normalise(text[start:] if end < 0 else text[start:end])))


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):
        pass
    return last


def _stated_value(match: re.Match[str]) -> Ratio | None:
    text, end = match.string, match.end()
    sentence_ends = text[end - 1] == "."  # "#### 72. 48 of them in May" does not go on
    if not sentence_ends and _CONTINUES.match(text, end):
        return None
    return _value(match)


def _value(match: re.Match[str]) -> Ratio | None:
    """The exact value of a match of `_NUMBER`, None if it is unreadable."""
    sign, over, under, run, divisor, exponent = match.groups()
    if exponent:
        return None
    value = _decimal(run or over)
    if divisor or under:
        value = _quotient(value, _decimal(divisor or under))
    if value is None or sign != "-":
        return value
    return -value[0], value[1]


def _decimal(run: str) -> Ratio | None:
    """The value of digits, commas, spaces and points, None if they are not one number."""
    digits = run.rstrip(".,")
    if len(digits) > MAX_NUMBER_CHARS:
        return None
    if digits.isdecimal():
        return int(digits), 1
    if not _WELL_FORMED.fullmatch(digits):
        return None
    whole, _, decimals = digits.replace(",", "").replace(" ", "").partition(".")
    return _lowest(int(whole + decimals), 10 ** len(decimals))


def _quotient(top: Ratio | None, bottom: Ratio | None) -> Ratio | None:
    if top is None or bottom is None or bottom[0] == 0:
        return None
    return _lowest(top[0] * bottom[1], top[1] * bottom[0])


def _lowest(numerator: int, denominator: int) -> Ratio:
    shared = gcd(numerator, denominator)
    return numerator // shared, denominator // shared


def _canonical(ratio: Ratio) -> str:
    """Digits without grouping or superfluous zeros; `p/q` if the decimals do not end."""
    value = Fraction(*ratio)
    for places in range(MAX_NUMBER_CHARS):
        scaled = value * 10**places
        if scaled.denominator == 1:
            digits = str(abs(scaled.numerator)).zfill(places + 1)
            point = len(digits) - places
            sign = "-" if value < 0 else ""
            return sign + digits[:point] + ("." + digits[point:] if places else "")
    return str(value)
