"""A fault as data, the two errors that end a run with a message instead of a traceback, and the
sentence for an unknown name.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One thing that cannot work, as data: sorted by `rule` or `key`, never by its sentence.

    Attributes:
        rule: which kind of rule it breaks: "value" (type or range), "unknown" (a name), "missing",
            "conflict" (values that exclude each other), "unsupported" (not on this engine),
            "layout", "model" (config.json or weights), "data" (rows, rewards, templates), "file".
        message: one sentence with the value and the rule.
        key: the key as it stands in the config, or the path; "" where there is no single one.
        fix: what to do; "" where the message says it.

    >>> str(Fault("value", "seed = -1 must be at least 0", "seed"))
    'seed = -1 must be at least 0'
    """

    rule: str
    message: str
    key: str = ""
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.message}. {self.fix}" if self.fix else self.message


class ConfigError(ValueError):
    """A config, a path or an input that cannot work: one sentence or several faults, one a line."""

    def __init__(self, *faults: Fault | str):
        super().__init__("\n".join(dict.fromkeys(map(str, faults))))
        self.faults = tuple(
            fault if isinstance(fault, Fault) else Fault("", fault) for fault in faults
        )


class EngineError(RuntimeError):
    """A run stopped by something outside our code; the message says what, where to look, and what
    to do.
    """


FEW = 12  # names that a sentence can list


def unknown(kind: str, value: object, known: Iterable[str]) -> str:
    """One sentence for an unknown name: the nearest known one, and all of them if they are few.

    >>> unknown("engine", "lokal", ["local", "mindspeed_rl"])
    "unknown engine 'lokal', did you mean 'local'? Known: local, mindspeed_rl"
    """
    known = sorted(known)
    near = difflib.get_close_matches(str(value), known, n=1)
    guess = f", did you mean {near[0]!r}?" if near else "."
    listing = f" Known: {', '.join(known)}" if len(known) <= FEW else ""
    return f"unknown {kind} {value!r}{guess}{listing}"
