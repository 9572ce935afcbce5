"""The examples in docstrings, run."""

import doctest
import importlib

import pytest

from tests import ROOT

MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "mindspeed_qerl").rglob("*.py"))
    if "\n    >>> " in file.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted and not results.failed
