"""The two errors that end a run with a message instead of a traceback, and the sentence for an unknown name."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config, a path or an input that cannot work; the message names the value, the rule and the way out."""


class EngineError(RuntimeError):
    """A run stopped by something outside our code; the message says what, where to look, and what to do."""


def unknown(kind: str, value: object, known: Iterable[str]) -> str:
    """One sentence for an unknown name, with the nearest known one and the list."""
    known = sorted(known)
    near = difflib.get_close_matches(str(value), known, n=1)
    return f"unknown {kind} {value!r}" + (f", did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(known)}"
