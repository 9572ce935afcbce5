"""Many ways to write the same become one, in ASCII: digits, signs and spaces of other scripts and
of TeX.

    >>> normalise(r"10\\,000 \u2248 \uff17\u0662 m\u00b2")
    '10 000 = 72 m;'
"""

import re
import unicodedata
from functools import cache

# A superscript, a fraction sign, a digit in a circle: unreadable, as is what it touches.
ODD = "\0"
# A sign without a meaning here: what it touches is unreadable.
UNKNOWN = "\1"
_SAME = {
    "'": "\u2018\u2019\u02b9\u02bb\u02bc\u2032\u00b4",
    ",": "\uff0c\ufe50\u066c\u201a",
    ".": "\uff0e\ufe52\u066b",
    "/": "\uff0f\u2044\u2215",
    "-": "\u2212\uff0d\ufe63\u2010\u2011\u2012\u2013",
    "*": "\u00d7\u00f7\u2217\uff0a",
    "=": "\uff1d\u2248\u2264\u2265\u2190\u2192\u21d2",
    "(": "\uff08",
    ")": "\uff09",
    "+": "\uff0b",
    "%": "\uff05\u00b0\u2103\u2109",
    " ": "\x85",
    UNKNOWN: "\u00b7\u2027\u30fb\u2030\u2031",  # middle dots, per mille
}
_SAME_AS = {character: plain for plain, characters in _SAME.items() for character in characters}
_OF_CATEGORY = {"No": ODD, "Nl": ODD, "Z": " ", "Cf": "'", "Sc": "$", "P": ";"}


@cache
def _plain(character: str) -> str:
    """Returns what a character beyond ASCII is read as."""
    category = unicodedata.category(character)
    if character in _SAME_AS:
        return _SAME_AS[character]
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category[0] == "L":
        return character
    return _OF_CATEGORY.get(category, _OF_CATEGORY.get(category[0], UNKNOWN))


_FOREIGN = re.compile(r"[^\x00-\x7f]")
_SPACES = re.compile("  +")
_SPACE_COMMAND = r"(?:(?:thin|med|thick|neg|en|hair|nobreak)?space|q?quad)(?![a-zA-Z]) ?"
# Each alternative begins with a character of its own, so the search goes by these.
_TEX = re.compile(
    rf"\\(?:[\\$%,:;>! ]|(?=[ehmnqst])(?:{_SPACE_COMMAND}|(?:text|mbox|mathrm)\{{(?:[ ~]*|,)\}}))"
    r"|,\\[!,]|\^\{ ?|\{(?:,|\\[,:;>! ]| )\}|~"
)
_TEX_SIGNS = {r"\\": r"\\", r"\$": "$", r"\%": "%", "^{": "^", "^{ ": "^"}
_TEX_SIGNS |= dict.fromkeys((r",\!", r",\,", "{,}", r"\text{,}", r"\mbox{,}", r"\mathrm{,}"), ",")


# The power of a unit or a footnote behind a word: m^2, $m$^2, m². It is no number.
_POWER = re.compile(rf"([^\W\d_][)}}\]$]{{0,3}})(?:\^[-+]?[0-9]++(?![a-zA-Z])|{ODD}++)")


def normalise(text: str) -> str:
    """Digits, signs and spaces in ASCII, single spaces, no powers of units."""
    if not text.isascii():
        text = _FOREIGN.sub(lambda character: _plain(character[0]), text)
    text = text.replace("\t", " ")
    if "\\" in text or "{" in text or "~" in text:
        text = _TEX.sub(lambda sign: _TEX_SIGNS.get(sign[0], " "), text)
    if "  " in text:
        text = _SPACES.sub(" ", text)
    if "^" in text or ODD in text:
        text = _POWER.sub(r"\1;", text)
    return text
