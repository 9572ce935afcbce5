"""The two errors that end a run with a message instead of a traceback, and the sentence for an
unknown name.
"""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config, a path or an input that cannot work; the message names the value, the rule and the
    way out.
    """


class EngineError(RuntimeError):
    """A run stopped by something outside our code; the message says what, where to look, and what
    to do.
    """


FEW = 12  # names that a sentence can list


def unknown(kind: str, value: object, known: Iterable[str], listing: str = "") -> str:
    """One sentence for an unknown name: the nearest known ones, and the list, or where many are
    known, their number.

    Args:
        listing: what lists them all, as the end of the sentence.

    >>> unknown("engine", "lokal", ["local", "mindspeed_rl"])
    "unknown engine 'lokal', did you mean 'local'? Known: local, mindspeed_rl"
    >>> unknown("key", "seet", [f"key{number}" for number in range(20)] + ["seed"], "--keys lists them")
    "unknown key 'seet', did you mean 'seed'? 21 are known: --keys lists them"
    """
    known = sorted(known)
    near = [
        repr(name)
        for name in difflib.get_close_matches(str(value), known, n=1 if len(known) <= FEW else 3)
    ]
    guess = (
        f", did you mean {' or '.join(filter(None, [', '.join(near[:-1]), near[-1]]))}?"
        if near
        else "."
    )
    if len(known) <= FEW:
        return f"unknown {kind} {value!r}{guess} Known: {', '.join(known)}"
    return f"unknown {kind} {value!r}{guess} {len(known)} are known" + (
        f": {listing}" if listing else ""
    )
