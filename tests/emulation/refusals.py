"""Tests of what operators refuse, in tables."""

from collections.abc import Callable
from typing import Any

import pytest


def refusals(
    operator: Callable, arguments: dict[str, Any], *rows: tuple[str, dict[str, Any]]
) -> Callable:
    """A test that `operator` refuses each change of `arguments` in these words; what is not
    emulated says so.
    """

    @pytest.mark.parametrize(("words", "change"), rows)
    def test(words, change):
        with pytest.raises((ValueError, NotImplementedError), match=words) as refused:
            operator(**arguments | change)
        assert refused.errisinstance(NotImplementedError) == ("emulated" in str(refused.value))

    return test
