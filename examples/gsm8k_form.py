"""A reward of one's own (docs/own_task.md), for models too small to be right often: the form that
is asked for.
"""

import re


def form(responses: list[str], answers: list[str], rows: list[dict]) -> list[float]:
    """1 for a response with "####" and a number behind it, right or wrong, else 0.

    >>> form(["so it is 72", "#### 72", "#### so"], ["72"] * 3, [{}] * 3)
    [0.0, 1.0, 0.0]
    """
    return [float(bool(re.search(r"####\s*\$?-?\d", response))) for response in responses]
