r"""Read the number that a response commits to, and compare it with the gold number exactly.

    >>> score("48 / 2 = 24, 48 + 24 = 72\n#### $72.00", "72", method="strict")
    1.0
    >>> extract_answer(r"so it is \boxed{10\,000}", "flexible")
    '10000'

An answer is stated by a marker and a number right behind it; only spaces, markup and a currency
sign may stand between.

- `strict` knows one marker, `####`, and its line may hold no second number: `#### 72 apples or 73`
  states nothing. Several `####` must be equal.
- `flexible` tries `####`, `\boxed{`, "answer is" / "answer:", "A:" in this order and takes the last
  statement of the first form that is there. If there is none, or it goes on into another number
  (`#### 48+24=72`), the last number of the response counts. One number is read, never a choice of
  several, so hedging buys nothing.

A number is all that stands together: `10\,000`, `3 1/2`, `1e5` and `2 million` are one number each.
If its value is not known for sure, or an unknown sign touches it, it is not read, and nothing is
read in its place. docs/verifier.md has the rules, and verdicts beside those of other verifiers.

The whole response is read, in time linear in its length: every repetition in the patterns below is
possessive or bounded, and no number is parsed before its length is known.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial

from .characters import ODD, UNKNOWN, normalise

METHODS = ("strict", "flexible")
Value = Fraction | None  # of a number; None: it is not read
MAX_NUMBER_CHARS = 64  # digits, and the signs between them

# ---- numbers ----

_FRACTION = r"\\[dtc]?frac ?(?:\{[^{}\n]*+\}|[0-9]) ?(?:\{[^{}\n]*+\}|[0-9])"
_SCALES = {
    "hundred": 100,
    "thousand": 1_000,
    "lakh": 100_000,
    "lac": 100_000,
    "million": 1_000_000,
    "crore": 10_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
    "dozen": 12,
}
# letters beyond ASCII that a pattern takes for these, and that `lower` leaves as they are
_AS_IGNORECASE = str.maketrans("\u017f\u0130\u0131", "sii")
# A branch that begins with a set is passed over by its first character.
_SCALE = "|".join(f"[{name[0]}{name[0].upper()}](?i:{name[1:]})" for name in _SCALES)
_SCALE = rf"(?:{_SCALE})(?i:s?)(?!\w)"
# from ten thousand and a hundred million to a thousand
_HAN_SCALES = "\u4e07\u842c\u4ebf\u5104\u5341\u767e\u5343"
# What stands between the pieces of one number.
_SCALE_JOINT = rf"{_SCALE},?(?: and)? "
_JOINT = (
    rf"(?:[,.'_:/^`]++|[a-zA-Z]++|[eE^][-+]|\{{\}}|[{_HAN_SCALES}] ?|{_SCALE_JOINT}"
    rf"| (?:[{_HAN_SCALES}] ?|{_SCALE_JOINT}|and (?=[0-9]++/[0-9]))?)"
)
_PIECE = rf"(?:[0-9{ODD}]++|{_FRACTION})"
_PIECES = rf"{_PIECE}(?:{_JOINT}?{_PIECE})*+"
# A minus behind a word, a number or a closing bracket is a subtraction or a hyphen, not a sign.
_NUMBER = (
    rf"(?P<sign>(?<![\w)\]}}%])[-+])?(?P<currency>\$|(?<=\$))?(?P<run>(?:(?<![\w.])\.)?{_PIECES})"
)
_WRAPPERS = r"(?:boxed|fbox|mbox|text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|bm|boldsymbol|underline)"
_REVERSED_WRAPPERS = (
    r"(?:dexob|xobf|xobm|(?:fb|ti|mr|fs)?txet|(?:fb|ti|mr|fs)htam|mb|lobmysdlob|enilrednu)"
)
_ANY_NUMBER = re.compile(_PIECES)
# What is in front of a number, read backwards: a point, a currency sign, a sign; or what makes it a
# part of something else, as in \sqrt{72}, x_{72}, \binom{9}{72}, 2^72, or behind an unknown sign.
_FRONT = re.compile(
    r"(?P<point>\.(?![\w.]))?(?P<currency>\$)?(?P<sign>[-+](?![\w)\]}%]))?"
    rf"(?P<cut>[{UNKNOWN}^]| ?trqs\\"
    rf"| ?\{{(?:(?=[0-9\]}}_])|(?!{_REVERSED_WRAPPERS}\\)[a-zA-Z]++\\))?"
)
_LONGEST_FRONT = 24
_DIGIT_IN_LINE = re.compile(rf"[0-9{ODD}]|\n|####")

_GAP = r"[ *_`$)}\\'\"(-]{0,6}+(?:\\?(?:text|textbf|mathrm)\{ ?)?+"
# How scale words of other languages begin: Millionen, millones, milhões, milioni, miliardi,
# miljoner, milyon, tausend.
_FOREIGN_SCALE = (
    r"[mM](?i:ill(?:ione|[oó]n|iard)|il(?:h|io|iard|jo|jard|yo|ya))|[bB](?i:ilh)"
    "|[tT](?i:ausend|usen)|[hH](?i:undert)|[dD](?i:uizend)"
)
# words that change a value, or may: a scale that can be a unit, a scale of another language, a part
_NOT_READ = (
    r"(?:(?:k|K|MM?|B|T|[mbt]n|M[Nn]|B[Nn]|T[Nn]|ml[nd]|M[Ii][OoLl]|mio|mille?|mil|Mrd"
    r"|grand|squared|cubed)(?!\w)"
    r"|(?:[tT](?i:en|housand)|[hH](?i:undred)|[mM](?i:illion)|[bB](?i:illion))(?i:ths?)(?!\w)"
    r"|and [a-z]+ (?:half|halves|thirds?|quarters?|fourths?|fifths?|eighths?|tenths?)(?!\w)"
    rf"|{_FOREIGN_SCALE}"
    "|\u043c\u043b\u043d|\u043c\u043b\u0440\u0434|\u0442\u044b\u0441|\u043c\u0438\u043b\u043b\u0438"
    rf"|[{_HAN_SCALES}\ub9cc\uc5b5\ucc9c\ubc31](?![\u514b\u7c73\u74e6\u5361])|\u03c0)"
)
_COMMANDS = rf"(?:{_WRAPPERS}|l?dots|circ|degree|end|right|par|times|div|cdot|approx)(?![a-zA-Z])"
_OTHER_VALUE = rf"{_GAP}(?:{_SCALE}|{_NOT_READ})"
# Nearly always a line ends behind a number, or a word follows that begins like none of those that
# `_AFTER` searches for. Its other alternatives say the same of both, and take longer.
_PLAIN_AFTER = (
    r"(?=(?:[.)}$*%]{0,4}| [-+*/=]?)(?:\n|$)|(?:[.,%] ?| |(?=\\))(?:\\text\{ ?)?"
    "(?!an|b[in]|c[dru]|d(?:iv|oz|ui)|gr|hu|la|m[iln]|or|sq|t[aehinoru]|x)[a-z]{2})"
)
# What stands behind a number: another one it goes on into, or, in ways that are known, a scale or
# the end.
_AFTER = re.compile(
    rf"{_PLAIN_AFTER}"
    r"|(?P<on>,? \$?[0-9]"
    r"|[ *_$%)}\\(,]{0,8}(?:[-+*/^=:;&|<>]|\\(?:times|div|cdot)|times|div|cdot|x|or|and|to)"
    r" ?[-*_$({\\]{0,8}[0-9])"
    rf"|(?:(?!{_OTHER_VALUE})|{_GAP}(?P<scale>{_SCALE})(?!{_OTHER_VALUE}))"
    rf"(?! ?\\(?!{_COMMANDS})[a-zA-Z])(?![)}}\]*$]{{0,4}}(?:\^(?!\\circ)|{ODD}))"
    rf"(?=$|[^\W_]|_(?![\w{{])|[\s)\]}}*`\"'$%.,;:!?<>=|&/#@-]|\((?!\$?[0-9.-])|\^\\circ"
    rf"|\\(?:[\\()\[\]]|{_COMMANDS}))"
)
_MONEY_SCALE = re.compile(r" ?[mbt](?![\w$])")  # $5m is no length, $5 m$ is
_WELL_FORMED = re.compile(
    r"(?:[0-9]{1,3}(?P<by>[, '_])[0-9]{3}(?:(?P=by)[0-9]{3})*"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]*)(?:\.[0-9]+)?"
)
_FRACTION_PARTS = re.compile(r"\\[dtc]?frac ?(?:\{ ?([^{}]*?) ?\}|(.)) ?(?:\{ ?([^{}]*?) ?\}|(.))")

# ---- forms ----

_MARKUP = rf"(?:[ *_`\"'$({{]|\\[(\[]|\\{_WRAPPERS}\{{){{0,16}}+"
_STATED = _MARKUP + _NUMBER


_FORMS = {
    "####": re.compile("####" + _STATED),
    "\\boxed": re.compile(r"\\boxed\{" + _STATED),
    # the letter before the word boundary: searched much faster
    "answer is": re.compile(r"[aA](?<!\w[aA])(?i:nswer[*_]{0,2}(?: is:?| ?:))" + _STATED),
    "A:": re.compile(r"A:(?<!\wA:)" + _STATED),
}
RULES = (*_FORMS, "last number", "none")  # how an answer can be found, strongest first
_GOLD = re.compile(_STATED)
_REST_OF_GOLD = re.compile(r"[ .,%$*_`'\")}\]\\]*")


def extract_answer(text: str, method: str = "flexible") -> str | None:
    """The number that `text` commits to in canonical form ("1,000.50" -> "1000.5"), or None if it
    states none.

    ValueError for an unknown `method`.
    """
    return extract_with_rule(text, method)[0]


def extract_with_rule(text: str, method: str = "flexible") -> tuple[str | None, str]:
    """Returns what `extract_answer` returns, and which of `RULES` found it ("none" when it is
    None).
    """
    value, rule = _extract(text, method)
    return (None, "none") if value is None else (_canonical(value), rule)


def score(response: str, gold: str, method: str = "flexible") -> float:
    """1.0 if `response` commits to a number equal to `gold` ("72", "1,000", "-7"), else 0.0.

    ValueError for an unknown `method`, and for a `gold` that is not one number.
    """
    return float(_extract(response, method)[0] == _read_number(gold))


def score_batch(
    responses: Sequence[str],
    golds: Sequence[str],
    rows: Sequence[dict] = (),
    *,
    method: str = "flexible",
) -> list[float]:
    """`score` of each response against the gold number beside it; `rows` is unused, every reward is
    called with them.

    ValueError if responses and gold answers are not equally many.
    """
    if len(responses) != len(golds):
        raise ValueError(
            f"{len(responses)} responses but {len(golds)} gold answers: give one for each response"
        )
    return [score(response, gold, method) for response, gold in zip(responses, golds)]


METHOD_OF_VERIFIER = {"gsm8k": "flexible", "gsm8k_strict": "strict"}
VERIFIERS = {
    name: partial(score_batch, method=method) for name, method in METHOD_OF_VERIFIER.items()
}


def canonical_number(text: str) -> str:
    """`text`, which must be one number and nothing else, in canonical form: "1,000" -> "1000",
    "$7.50" -> "7.5".

    ValueError if it is anything else.
    """
    return _canonical(_read_number(text))


def _read_number(text: str) -> Fraction:
    normalised = normalise(str(text)).strip()
    match = _GOLD.match(normalised)
    value, end = _value_of(normalised, match.end(), *match.groups()) if match else (None, None)
    if value is None or end is None or not _REST_OF_GOLD.fullmatch(normalised, end):
        raise ValueError(
            f"not a number: {str(text)[:80]!r}; write the gold answer as digits, such as '72', "
            "'-7' or '1,000.5'"
        )
    return value


def _extract(text: str, method: str) -> tuple[Value, str]:
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use one of {', '.join(METHODS)}")
    text = normalise(text)
    if method == "strict":
        values = {_value_of_line(match) for match in _FORMS["####"].finditer(text)}
        return (values.pop() if len(values) == 1 else None), "####"
    for rule, form in _FORMS.items():
        if last := _last(form, text):
            value, end = _value_of(text, last.end(), *last.groups())
            if end is None:
                break  # an equation such as "#### 48+24=72": its result is the last number
            return value, rule
    return _last_number(text), "last number"


def _last_number(text: str) -> Value:
    """The value of the last number, from the last line that has one; powers of units are none."""
    for line in reversed(text.split("\n")):
        if last := _last(_ANY_NUMBER, line):
            begin, end = last.span()
            front = line[max(begin - _LONGEST_FRONT, 0) : begin]
            in_front = _FRONT.match(front[::-1])
            assert in_front, "the pattern matches any text"
            point, currency, sign, cut = in_front.groups()
            return None if cut else _value_of(line, end, sign, currency, (point or "") + last[0])[0]
    return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):
        pass
    return last


def _value_of_line(match: re.Match[str]) -> Value:
    """Returns what a `####` and its line state: None if there is a second number, or an unreadable
    one.
    """
    value, end = _value_of(match.string, match.end(), *match.groups())
    if value is None or end is None:
        return None
    second = _DIGIT_IN_LINE.search(match.string, end)
    return value if second is None or second[0] in ("\n", "####") else None


def _value_of(
    text: str, end: int, sign: str | None, currency: str | None, run: str
) -> tuple[Value, int | None]:
    """The exact value of a number in `text` that ends at `end`, None if it is unreadable; and where
    what belongs to it ends, None if it goes on.

    Args:
        sign, currency, run: the groups of `_NUMBER`.
    """
    after = _AFTER.match(text, end)
    if after is None or currency is not None and _MONEY_SCALE.match(text, end):
        return None, end
    if after.lastgroup == "on":
        return None, None
    value = _number(sign or "", run)
    if value is None:
        return None, end
    if after.lastgroup == "scale":
        name = after["scale"].translate(_AS_IGNORECASE).lower().removesuffix("s")
        value *= _SCALES[name]
    return value, after.end()


def _number(sign: str, run: str) -> Value:
    """The value of what is written."""
    if "/" not in run and "\\" not in run:
        return _decimal(sign, run)
    if fraction := _FRACTION_PARTS.fullmatch(run):
        over, under = (part for part in fraction.groups() if part is not None)
    elif " " in run:  # "3 1/2"
        return None
    else:
        over, _, under = run.partition("/")
    top = _decimal(sign, over)
    bottom = _decimal("", under)
    return top / bottom if top is not None and bottom else None


def _decimal(sign: str, digits: str) -> Value:
    """The value of digits, signs that group them and a point; None if this is not one number."""
    match = _WELL_FORMED.fullmatch(digits) if len(digits) <= MAX_NUMBER_CHARS else None
    if not digits or match is None:
        return None
    return Fraction(sign + digits.replace(match["by"] or ",", ""))


def _canonical(value: Fraction) -> str:
    """Digits without grouping or superfluous zeros; `p/q` if the decimals do not end."""
    for places in range(MAX_NUMBER_CHARS):
        scaled = value * 10**places
        if scaled.denominator == 1:
            return f"{Decimal(f'{scaled.numerator}e-{places}'):f}"
    return str(value)
