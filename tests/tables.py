"""Tables of texts, a case a line, with signs of many scripts written in ASCII."""

import re


def plain(text):
    r"""The characters behind ⏎, ⇥ and \uXXXX."""
    text = text.replace("⏎", "\n").replace("⇥", "\t")
    return re.sub(r"\\[uU]([0-9a-f]{8}|[0-9a-f]{4})", lambda code: chr(int(code[1], 16)), text)


def cells(table):
    """The texts of each line, between which ¦ stands."""
    return [tuple(plain(line).split(" ¦ ")) for line in table.strip("\n").split("\n")]
