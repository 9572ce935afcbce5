"""The verifier once more, one character after another: no regular expression, no shortcut, no code
of the package. It does what docs/verifier.md says in words.
"""

import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache

DIGITS, LETTERS = "0123456789", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
ODD, UNKNOWN, GOES_ON = "\0", "\1", "goes on"
LONGEST = 64
SAME = {
    "\u2018\u2019\u02b9\u02bb\u02bc\u2032\u00b4": "'",
    "\uff0c\ufe50\u066c\u201a": ",",
    "\uff0e\ufe52\u066b": ".",
    "\uff0f\u2044\u2215": "/",
    "\u2212\uff0d\ufe63\u2010\u2011\u2012\u2013": "-",
    "\u00d7\u00f7\u2217\uff0a": "*",
    "\uff1d\u2248\u2264\u2265\u2190\u2192\u21d2": "=",
    "\uff08": "(",
    "\uff09": ")",
    "\uff0b": "+",
    "\uff05\u00b0\u2103\u2109": "%",
    "\x85": " ",
    "\u00b7\u2027\u30fb\u2030\u2031": UNKNOWN,
}
WRAPPERS = (
    "boxed",
    "fbox",
    "mbox",
    "text",
    "textbf",
    "textit",
    "textrm",
    "textsf",
    "mathbf",
    "mathit",
    "mathrm",
    "mathsf",
    "bm",
    "boldsymbol",
    "underline",
)
COMMANDS = (
    *WRAPPERS,
    "ldots",
    "dots",
    "circ",
    "degree",
    "end",
    "right",
    "par",
    "times",
    "div",
    "cdot",
    "approx",
)
SCALES = {
    "hundred": 2,
    "thousand": 3,
    "lakh": 5,
    "lac": 5,
    "million": 6,
    "crore": 7,
    "billion": 9,
    "trillion": 12,
}
HAN = "万萬亿億十百千"
AMBIGUOUS = (
    "k K M MM B T mn bn tn Mn MN Bn BN Tn TN mln mld MiO Mio MIO MIo Mil MIL MIl MiL mio mill "
    "mille mil Mrd grand squared cubed"
).split()
PARTS = (
    "half halves third thirds quarter quarters fourth fourths fifth fifths eighth eighths tenth "
    "tenths"
).split()
FOREIGN = ("млн", "млрд", "тыс", "милли", "π")
STEMS = (
    "millione",
    "millon",
    "millón",
    "milliard",
    "milh",
    "milio",
    "miliard",
    "miljo",
    "miljard",
    "milyo",
    "milya",
    "bilh",
    "tausend",
    "hundert",
    "tusen",
    "duizend",
)


def read(text: str, method: str) -> Fraction | None:
    """The number that `text` commits to."""
    text = powers_left_out(single_spaces(tex(plain(text))))
    if method == "strict":
        stated = {alone_in_line(text, *found) for found in statements(text, hashes)}
        return stated.pop() if len(stated) == 1 else None
    for form in (hashes, boxed, answer_is, a_colon):
        if found := list(statements(text, form)):
            if found[-1][0] != GOES_ON:
                return found[-1][0]
            break
    return last_number(text)


# ---- one alphabet ----


def plain(text: str) -> str:
    return "".join(map(plain_character, text))


@cache
def plain_character(char: str) -> str:
    for signs, same in SAME.items():
        if char in signs:
            return same
    category = unicodedata.category(char)
    if category == "Nd":
        return DIGITS[unicodedata.decimal(char)]
    if char == "\t":
        return " "
    if ord(char) < 128 or category[0] == "L":
        return char
    if category[0] == "P":
        return ";"
    return {"No": ODD, "Nl": ODD, "Zs": " ", "Zl": " ", "Zp": " ", "Cf": "'", "Sc": "$"}.get(
        category, UNKNOWN
    )


def tex(text: str) -> str:
    made, at = [], 0
    while at < len(text):
        sign, length = tex_sign(text, at)
        made.append(sign)
        at += length
    return "".join(made)


def tex_sign(text: str, at: int) -> tuple[str, int]:
    """What stands for what is written here, and the length of that."""
    two, three = text[at : at + 2], text[at : at + 3]
    if three in (",\\!", ",\\,", "{,}"):
        return ",", 3
    if two == "^{":
        return "^", 2 + text.startswith(" ", at + 2)
    if text[at] == "~":
        return " ", 1
    if three == "{ }":
        return " ", 3
    if len(two) == 2 and two[0] == "\\":
        if two[1] == "\\":
            return two, 2
        if two[1] in "$%":
            return two[1], 2
        if two[1] in ",:;>! ":
            return " ", 2
        name = letters_from(text, at + 1)
        end = at + 1 + len(name)
        if name in (
            "quad",
            "qquad",
            "space",
            "thinspace",
            "medspace",
            "thickspace",
            "negspace",
            "enspace",
            "hairspace",
            "nobreakspace",
        ):
            return " ", end + text.startswith(" ", end) - at
        if name in ("text", "mbox", "mathrm") and text.startswith("{", end):
            if text.startswith("{,}", end):
                return ",", end + 3 - at
            inside = end + 1
            while text[inside : inside + 1] in (" ", "~"):
                inside += 1
            if text.startswith("}", inside):
                return " ", inside + 1 - at
    if two == "{\\" and text[at + 2 : at + 3] in tuple(",:;>! ") and text.startswith("}", at + 3):
        return " ", 4
    return text[at], 1


def letters_from(text: str, at: int) -> str:
    end = at
    while text[end : end + 1] and text[end] in LETTERS:
        end += 1
    return text[at:end]


def single_spaces(text: str) -> str:
    made = []
    for char in text:
        if char != " " or made[-1:] != [" "]:
            made.append(char)
    return "".join(made)


def powers_left_out(text: str) -> str:
    made, at = [], 0
    while at < len(text):
        end = power_behind(text, at) if text[at].isalpha() else None
        if end:
            while text[at] not in ("^", ODD):
                made.append(text[at])
                at += 1
            made.append(";")
            at = end
        else:
            made.append(text[at])
            at += 1
    return "".join(made)


def power_behind(text: str, letter: int) -> int | None:
    """Where the power that belongs to the letter ends."""
    at = letter + 1
    while at <= letter + 3 and text[at : at + 1] in tuple(")}]$"):
        at += 1
    if text.startswith(ODD, at):
        while text.startswith(ODD, at):
            at += 1
        return at
    if not text.startswith("^", at):
        return None
    at += 2 if text[at + 1 : at + 2] in ("-", "+") else 1
    end = digits_from(text, at)
    return end if end > at and text[end : end + 1] not in tuple(LETTERS) else None


def digits_from(text: str, at: int, wanted: str = DIGITS) -> int:
    while text[at : at + 1] in tuple(wanted):
        at += 1
    return at


def scan(text: str, match: Callable[[str, int], tuple | None]) -> Iterator[tuple]:
    """What `match` finds from left to right, its end last; nothing overlaps."""
    at = 0
    while at < len(text):
        found = match(text, at)
        if found:
            yield found
        at = found[-1] if found else at + 1


def statements(text: str, form: Callable[[str, int], int | None]) -> Iterator[tuple]:
    """Value of each statement of a form (None: unreadable; GOES_ON), where it ends, and where its
    number does.
    """

    def match(text: str, at: int) -> tuple | None:
        start = form(text, at)
        return number(text, markup(text, start)) if start is not None else None

    return scan(text, match)


def alone_in_line(text: str, value: Fraction | str | None, end: int, _: int) -> Fraction | None:
    at = end
    while at < len(text) and text[at] != "\n" and not text.startswith("####", at):
        if text[at] in DIGITS + ODD:
            return None
        at += 1
    return None if value == GOES_ON else value


# ---- forms: where the statement's number or markup begins, None if the form is not here ----


def word(char: str) -> bool:
    return char.isalnum() or char == "_"


def before(text: str, at: int) -> str:
    return text[at - 1] if at > 0 else " "


def hashes(text: str, at: int) -> int | None:
    return at + 4 if text.startswith("####", at) else None


def boxed(text: str, at: int) -> int | None:
    return at + 7 if text.startswith("\\boxed{", at) else None


def a_colon(text: str, at: int) -> int | None:
    return at + 2 if text.startswith("A:", at) and not word(before(text, at)) else None


def letters(text: str, at: int, wanted: str) -> bool:
    """In either case; as Python ignores case, a long s is an s, and an i may lack its dot or keep
    it as a capital.
    """
    return (
        "".join(
            {"\u017f": "s", "\u0130": "i", "\u0131": "i"}.get(char, char.lower())
            for char in text[at : at + len(wanted)]
        )
        == wanted
    )


def answer_is(text: str, at: int) -> int | None:
    if not letters(text, at, "answer") or word(before(text, at)):
        return None
    at += len("answer")
    for _ in range(2):
        at += text[at : at + 1] in ("*", "_")
    if letters(text, at, " is"):
        return at + 3 + (text[at + 3 : at + 4] == ":")
    at += text[at : at + 1] == " "
    return at + 1 if text[at : at + 1] == ":" else None


def markup(text: str, at: int) -> int:
    """Where the number can begin: behind sixteen marks at most."""
    for _ in range(16):
        marks = [
            mark
            for mark in (*" *_`\"'$({", "\\(", "\\[", *(f"\\{name}{{" for name in WRAPPERS))
            if text.startswith(mark, at)
        ]
        if not marks:
            break
        at += len(marks[0])
    return at


# ---- numbers ----


def number(text: str, at: int) -> tuple | None:
    """The statement that begins here."""
    negative = text.startswith("-", at)
    if text[at : at + 1] in ("+", "-"):
        if word(before(text, at)) or before(text, at) in ")]}%":
            return None
        at += 1
    at += text.startswith("$", at)
    money = before(text, at) == "$"
    start = at + starts_with_point(text, at)
    end = pieces(text, start)
    return valued(text, at, end, negative, money) if end else None


def starts_with_point(text: str, at: int) -> bool:
    return text.startswith(".", at) and not word(before(text, at)) and before(text, at) != "."


def pieces(text: str, at: int) -> int | None:
    end = piece(text, at)
    while end:
        following = [after for start in joints(text, end) if (after := piece(text, start))]
        if not following:
            break
        end = following[0]
    return end


def piece(text: str, at: int) -> int | None:
    """The end of digits or of a TeX fraction that begin here."""
    if text[at : at + 1] in tuple(DIGITS + ODD):
        return digits_from(text, at, DIGITS + ODD)
    arguments = fraction(text, at)
    return arguments[-1] if arguments else None


def fraction(text: str, at: int) -> tuple[str, str, int] | None:
    if letters_from(text, at + 1)[:5] and text.startswith("\\", at):
        for name in ("frac", "dfrac", "tfrac", "cfrac"):
            if text.startswith(name, at + 1):
                over = argument(text, at + 1 + len(name))
                under = argument(text, over[1]) if over else None
                return (over[0], under[0], under[1]) if under else None
    return None


def argument(text: str, at: int) -> tuple[str, int] | None:
    at += text.startswith(" ", at)
    if text[at : at + 1] in tuple(DIGITS):
        return text[at], at + 1
    if not text.startswith("{", at):
        return None
    end = at + 1
    while end < len(text) and text[end] not in "{}\n":
        end += 1
    inside = text[at + 1 : end]
    inside = inside.removeprefix(" ")
    return (inside.removesuffix(" "), end + 1) if text.startswith("}", end) else None


def joints(text: str, at: int) -> Iterator[int]:
    """Where the next piece of the same number may begin."""
    yield at
    yield digits_from(text, at, ",.'_:/^`")
    yield at + len(letters_from(text, at))
    if text[at : at + 1] in ("e", "E", "^") and text[at + 1 : at + 2] in ("-", "+"):
        yield at + 2
    if text.startswith("{}", at):
        yield at + 2
    space = at + text.startswith(" ", at)
    if text[space : space + 1] in tuple(HAN):
        yield space + 1 + text.startswith(" ", space + 1)
    scale = scale_word(text, space) if text[space : space + 1] in tuple(LETTERS) else None
    if scale:
        end = scale[1] + text.startswith(",", scale[1])
        end += 4 * text.startswith(" and", end)
        if text.startswith(" ", end):
            yield end + 1
    if text.startswith(" and ", at):
        slash = digits_from(text, at + 5)
        if (
            slash > at + 5
            and text.startswith("/", slash)
            and text[slash + 1 : slash + 2] in tuple(DIGITS)
        ):
            yield at + 5
    if text.startswith(" ", at):
        yield at + 1


def scale_word(text: str, at: int) -> tuple[int, int] | None:
    """The factor that is written here, and where it ends."""
    for name, factor in (*((name, 10**zeros) for name, zeros in SCALES.items()), ("dozen", 12)):
        if letters(text, at, name):
            for end in (at + len(name) + 1, at + len(name)):
                if (end == at + len(name) or letters(text, end - 1, "s")) and not word(
                    text[end : end + 1]
                ):
                    return factor, end
    return None


def valued(text: str, start: int, end: int, negative: bool, money: bool) -> tuple:
    if goes_on(text, end) and not ends_at_once(text, end):
        return GOES_ON, end, end
    factor, behind = 1, end
    value = written(text[start:end])
    if not ends_at_once(text, end):
        scale = scale_word(text, gap(text, end))
        if scale:
            factor, behind = scale
        if value_changes(text, behind) or not touch_known(text, behind):
            value = None
    if money:
        at = end + text.startswith(" ", end)
        if (
            text[at : at + 1] in ("m", "b", "t")
            and not word(text[at + 1 : at + 2])
            and text[at + 1 : at + 2] != "$"
        ):
            value = None
    if value is not None:
        value *= -factor if negative else factor
    return value, behind if value is not None else end, end


def ends_at_once(text: str, end: int) -> bool:
    end += text.startswith(".", end)
    return text[end : end + 1] in ("", "\n")


def gap(text: str, at: int) -> int:
    for _ in range(6):
        at += text[at : at + 1] in tuple(" *_`$)}\\'\"(-")
    for name in ("text{", "textbf{", "mathrm{"):
        for opening in (name, "\\" + name):
            if text.startswith(opening, at):
                return at + len(opening) + text.startswith(" ", at + len(opening))
    return at


def value_changes(text: str, end: int) -> bool:
    """Does a word or a sign follow that makes it another value, or might?"""
    at = gap(text, end)
    if scale_word(text, at) or text[at : at + 1] in tuple("만억천백"):
        return text[at + 1 : at + 2] not in tuple("克米瓦卡") or bool(scale_word(text, at))
    if text[at : at + 1] in tuple(HAN) and text[at + 1 : at + 2] not in tuple("克米瓦卡"):
        return True
    if any(text.startswith(name, at) for name in FOREIGN):
        return True
    if any(text[at : at + len(stem)].lower() == stem for stem in STEMS):
        return True
    ends = [at + len(name) for name in AMBIGUOUS if text.startswith(name, at)]
    for name in ("ten", "hundred", "thousand", "million", "billion"):
        ends += [at + len(name + s) for s in ("th", "ths") if letters(text, at, name + s)]
    if text.startswith("and ", at):
        first = at + 4
        while text[first : first + 1] in tuple(LETTERS[:26]):
            first += 1
        if first > at + 4 and text.startswith(" ", first):
            ends += [first + 1 + len(part) for part in PARTS if text.startswith(part, first + 1)]
    if any(not word(text[place : place + 1]) for place in ends):
        return True
    at = end + text.startswith(" ", end)
    if text.startswith("\\", at) and text[at + 1 : at + 2] in tuple(LETTERS):
        return letters_from(text, at + 1) not in COMMANDS
    at = end
    for _ in range(4):
        at += text[at : at + 1] in tuple(")}]*$")
    return (
        text.startswith(ODD, at) or text.startswith("^", at) and not text.startswith("^\\circ", at)
    )


def touch_known(text: str, at: int) -> bool:
    char, following = text[at : at + 1], text[at + 1 : at + 2]
    if char == "_":
        return not word(following) and following != "{"
    if char == "(":
        return not any(following == mark for mark in (*DIGITS, ".", "-")) and not (
            following == "$" and text[at + 2 : at + 3] in (*DIGITS, ".", "-")
        )
    if char == "\\":
        return following in tuple("\\()[]") or letters_from(text, at + 1) in COMMANDS
    return (
        char == ""
        or char.isalnum()
        or char.isspace()
        or char in ")]}*`\"'$%.,;:!?<>=|&/#@-"
        or text.startswith("^\\circ", at)
    )


def written(digits: str) -> Fraction | None:
    """The value of what is written between the ends of a number."""
    if digits.startswith("\\"):
        over, under, end = fraction(digits, 0)
        return divided(over, under) if end == len(digits) else None
    if "\\" in digits or "/" in digits and " " in digits:
        return None
    over, slash, under = digits.partition("/")
    return divided(over, under if slash else "1")


def divided(top: str, bottom: str) -> Fraction | None:
    over, under = decimal(top), decimal(bottom)
    return over / under if over is not None and under else None


def decimal(digits: str) -> Fraction | None:
    whole, *decimals = digits.split(".")
    if not digits or len(digits) > LONGEST or len(decimals) > 1 or decimals == [""]:
        return None
    for separator in ", '_":
        first, *groups = whole.split(separator)
        sizes = [len(group) for group in groups]
        threes = all(size == 3 for size in sizes) and (not groups or 1 <= len(first) <= 3)
        indian = (
            separator == ","
            and sizes[-1:] == [3]
            and len(first) in (1, 2)
            and (len(sizes) > 1 and all(size == 2 for size in sizes[:-1]))
        )
        figures = first + "".join(groups) + "".join(decimals)
        if all(char in DIGITS for char in figures) and (threes or indian):
            value = Fraction(0)
            for char in figures:
                value = 10 * value + DIGITS.index(char)
            return value / 10 ** len("".join(decimals))
    return None


def goes_on(text: str, end: int) -> bool:
    """Does another number stand behind a comma, an operator or a conjunction?"""
    at = end + text.startswith(",", end)
    if text.startswith(" ", at):
        at += 1 + text.startswith("$", at + 1)
        if text[at : at + 1] in tuple(DIGITS):
            return True
    places = perhaps(text, {end}, " *_$%)}\\(,", 8)
    words = ("times", "div", "cdot")
    operators = (*"-+*/^=:;&|<>", *words, *("\\" + word for word in words), "x", "or", "and", "to")
    places = {
        place + len(operator)
        for place in places
        for operator in operators
        if text.startswith(operator, place)
    }
    places = perhaps(text, perhaps(text, places, " ", 1), "-*_$({\\", 8)
    return any(text[place : place + 1] in tuple(DIGITS) for place in places)


def perhaps(text: str, places: set[int], chars: str, most: int) -> set[int]:
    """Where one can be after none to `most` of `chars`."""
    for _ in range(most):
        places = places | {place + 1 for place in places if text[place : place + 1] in tuple(chars)}
    return places


def last_number(text: str) -> Fraction | None:
    def match(text: str, at: int) -> tuple[int, int] | None:
        end = pieces(text, at)
        return (at, end) if end else None

    found = list(scan(text, match))
    if not found:
        return None
    start, end = found[-1]
    at = start - starts_with_point(text, start - 1) if start else 0
    point = at
    money = before(text, at) == "$"
    at -= money
    negative = False
    if before(text, at) in ("-", "+") and not (
        word(before(text, at - 1)) or before(text, at - 1) in ")]}%"
    ):
        negative = before(text, at) == "-"
        at -= 1
    if is_cut(text, at):
        return None
    value = valued(text, point, end, negative, money)[0]
    return None if value == GOES_ON else value


def is_cut(text: str, at: int) -> bool:
    """Is what stands before this place a sign that makes the number a part of something else?"""
    if before(text, at) in (UNKNOWN, "^"):
        return True
    inner = at - text.startswith(" ", at - 1) if at else 0
    if text[max(inner - 5, 0) : inner] == "\\sqrt":
        return True
    if before(text, inner) != "{":
        return False
    name_end = inner - 1
    if before(text, name_end) in (*DIGITS, "]", "}", "_"):
        return True
    start = name_end
    while start and text[start - 1] in LETTERS:
        start -= 1
    return start < name_end and before(text, start) == "\\" and text[start:name_end] not in WRAPPERS
