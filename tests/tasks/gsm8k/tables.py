"""Tables of texts with signs of many scripts, written in ASCII."""

import re


def plain(text):
    r"""The characters behind ⏎, ⇥ and \uXXXX."""
    text = text.replace("⏎", "\n").replace("⇥", "\t")
    return re.sub(r"\\[uU]([0-9a-f]{8}|[0-9a-f]{4})", lambda code: chr(int(code[1], 16)), text)


def rows_of(table):
    """(response, gold, strict, flexible) of each line."""
    cells = [line.split(" ¦ ") for line in plain(table.strip().replace("⏎", "\0")).split("\n")]
    return [(text.replace("\0", "\n"), gold, int(a), int(b)) for text, gold, a, b in cells]
