"""The verifier once more, one character after another: no regular expression, no shortcut, no code of the package. It
does what docs/verifier.md says in words."""

import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction

DIGITS, RUN = "0123456789", "0123456789,.\0"
CURRENCY, HYPHENS = "$€£¥", "\u2212\u2010\u2011\u2013\uff0d\ufe63"
LONGEST = 64
Number = tuple[Fraction | None, int]  # None: unreadable; where it ends


def read(text: str, method: str) -> Fraction | None:
    """The number that `text` commits to."""
    text = plain(text)
    if method == "strict":
        stated = {value for value, _ in statements(text, hashes)}
        return stated.pop() if len(stated) == 1 else None
    for form in (hashes, boxed, answer_is, a_colon):
        if found := list(statements(text, form)):
            if found[-1][0] is not None:
                return found[-1][0]
            break
    numbers = list(scan(text, lambda text, at: number(text, at, spaced=False)))
    return numbers[-1][0] if numbers else None


def plain(text: str) -> str:
    made = []
    for char in text:
        if char in "\t\u00a0\u2009\u202f":
            char = " "
        elif char in HYPHENS:
            char = "-"
        elif ord(char) > 127 and unicodedata.category(char) in ("Nd", "No") and ord(char) < 0x10000:
            char = str(ord(char) - 0xff10) if 0xff10 <= ord(char) < 0xff1a else "\0"
        if char != " " or made[-1:] != [" "]:
            made.append(char)
    return ",".join(",".join("".join(made).split("{,}")).split(",\\!"))


def scan(text: str, match: Callable[[str, int], Number | None]) -> Iterator[Number]:
    """What `match` finds from left to right; nothing overlaps."""
    at = 0
    while at < len(text):
        found = match(text, at)
        if found:
            yield found
        at = found[1] if found else at + 1


def statements(text: str, form: Callable[[str, int], int | None]) -> Iterator[Number]:
    """Value and end of each statement of a form; None for one that goes on, or is unreadable."""
    def match(text: str, at: int) -> Number | None:
        start = form(text, at)
        for place in reversed(markup(text, start)) if start is not None else ():
            if found := number(text, place, spaced=True):
                value, end = found
                return (value if text[end - 1] == "." or not goes_on(text, end) else None), end
        return None
    return scan(text, match)


# ---- forms: where the statement's number or markup begins, None if the form is not here ----

def word(char: str) -> bool:
    return char.isalnum() or char == "_"


def before(text: str, at: int) -> str:
    return text[at - 1] if at else " "


def hashes(text: str, at: int) -> int | None:
    return at + 4 if text.startswith("####", at) else None


def boxed(text: str, at: int) -> int | None:
    return at + 7 if text.startswith("\\boxed{", at) else None


def a_colon(text: str, at: int) -> int | None:
    return at + 2 if text.startswith("A:", at) and not word(before(text, at)) else None


def letters(text: str, at: int, wanted: str) -> bool:
    """In either case; as Python ignores case, a long s is an s, and an i may lack its dot or keep it as a capital."""
    return "".join({"\u017f": "s", "\u0130": "i", "\u0131": "i"}.get(char, char.lower())
                   for char in text[at:at + len(wanted)]) == wanted


def answer_is(text: str, at: int) -> int | None:
    if not letters(text, at, "answer") or word(before(text, at)):
        return None
    at += len("answer")
    for _ in range(2):
        at += text[at:at + 1] in ("*", "_")
    if letters(text, at, " is"):
        return at + 3 + (text[at + 3:at + 4] == ":")
    at += text[at:at + 1] == " "
    return at + 1 if text[at:at + 1] == ":" else None


def markup(text: str, at: int) -> list[int]:
    """Where the number can begin: behind none, one, ... sixteen marks."""
    places = [at]
    while len(places) <= 16:
        marks = [mark for mark in (*" *_`\"'({", *CURRENCY, *("\\" + char for char in "$([,;!"), "\\boxed{", "\\text{",
                                   "\\textbf{", "\\mathbf{", "\\mathrm{") if text.startswith(mark, places[-1])]
        if not marks:
            break
        places.append(places[-1] + len(marks[0]))
    return places


# ---- numbers ----

def number(text: str, at: int, spaced: bool) -> Number | None:
    """The number that begins here; `spaced`: groups of three may stand apart."""
    negative = text[at:at + 1] == "-"
    if text[at:at + 1] in ("+", "-"):
        if word(before(text, at)) or before(text, at) in ")]}%":
            return None
        at += 1
    if text[at:at + 1] == "\\" and text[at + 1:at + 2] in tuple(CURRENCY):
        at += 2
    elif text[at:at + 1] in tuple(CURRENCY):
        at += 1
    found = fraction(text, at) or quotient(text, at, spaced)
    if not found:
        return None
    value, end = found
    return (-value if negative and value is not None else value), end


def fraction(text: str, at: int) -> Number | None:
    for name in ("\\frac{", "\\dfrac{", "\\tfrac{"):
        if text.startswith(name, at):
            over = run(text, at + len(name))
            under = run(text, over + 2) if over and text.startswith("}{", over) else None
            if under and text.startswith("}", under):
                return divided(text[at + len(name):over], text[over + 2:under]), under + 1
    return None


def quotient(text: str, at: int, spaced: bool) -> Number | None:
    middle = (apart(text, at) if spaced else None) or run(text, at)
    if middle is None:
        return None
    end = run(text, middle + 1) if text.startswith("/", middle) else None
    value = divided(text[at:middle], text[middle + 1:end] if end else "1")
    end = end or middle
    if text[end:end + 1] in ("e", "E"):
        power = end + 1 + (text[end + 1:end + 2] in ("+", "-"))
        if text[power:power + 1] in tuple(DIGITS):
            while text[power:power + 1] in tuple(DIGITS):
                power += 1
            return None, power
    return value, end


def run(text: str, at: int) -> int | None:
    """Where the digits, commas and points that begin here end."""
    if text[at:at + 1] == "." and not word(before(text, at)) and before(text, at) != ".":
        at += 1
    return rest_of_run(text, at) if text[at:at + 1] in tuple(DIGITS) else None


def rest_of_run(text: str, at: int) -> int:
    while text[at:at + 1] in tuple(RUN):
        at += 1
    return at


def apart(text: str, at: int) -> int | None:
    """The same, for groups of three with a space between."""
    first = at
    while text[at:at + 1] in tuple(DIGITS):
        at += 1
    groups = 0
    while text[at:at + 1] == " " and len(text[at + 1:at + 4]) == 3 and all(c in DIGITS for c in text[at + 1:at + 4]):
        at, groups = at + 4, groups + 1
    return rest_of_run(text, at) if groups and text[first:first + 4].find(" ") in (1, 2, 3) else None


def divided(top: str, bottom: str) -> Fraction | None:
    over, under = decimal(top), decimal(bottom)
    return over / under if over is not None and under else None


def decimal(digits: str) -> Fraction | None:
    while digits[-1:] in (".", ","):
        digits = digits[:-1]
    whole, *decimals = digits.split(".")
    if len(digits) > LONGEST or len(decimals) > 1 or decimals == [""]:
        return None
    if any(char not in DIGITS for char in "".join(decimals)):
        return None
    for separator in ", ":
        first, *groups = whole.split(separator)
        if all(c in DIGITS for c in first + "".join(groups)) and (
                not groups or 1 <= len(first) <= 3 and all(len(group) == 3 for group in groups)):
            value = Fraction(0)
            for char in first + "".join(groups) + "".join(decimals):
                value = 10 * value + DIGITS.index(char)
            return value / 10 ** len("".join(decimals))
    return None


def goes_on(text: str, end: int) -> bool:
    """Does another number stand right behind, or behind an operator or a conjunction?"""
    if text[end:end + 1] == " " and text[end + 1:end + 2] in tuple(DIGITS):
        return True
    places = perhaps(text, {end}, "*_$%)}\\", 8)
    places = perhaps(text, places, " ", 1)
    words = ("times", "div", "cdot")
    operators = (*"-+*/×÷^=:;~&|<>", *words, *("\\" + word for word in words), "x", "or", "and", "to")
    places = {place + len(operator) for place in places for operator in operators if text.startswith(operator, place)}
    places = perhaps(text, perhaps(text, places, " ", 1), "-*_$({\\", 8)
    return any(text[place:place + 1] in tuple(DIGITS) for place in places)


def perhaps(text: str, places: set[int], chars: str, most: int) -> set[int]:
    """Where one can be after none to `most` of `chars`."""
    for _ in range(most):
        places = places | {place + 1 for place in places if text[place:place + 1] in tuple(chars)}
    return places
