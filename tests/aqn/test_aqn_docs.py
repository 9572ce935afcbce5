"""docs/aqn.md: each Python example prints what the text block below it shows."""

import re
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = re.findall(
    r"```python\n(.*?)```\n```text\n(.*?)```", (ROOT / "docs/aqn.md").read_text(), re.DOTALL
)


def run(code):
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


@pytest.mark.parametrize("example", range(2))
def test_example_prints_what_the_page_shows(example):
    code, shown = EXAMPLES[example]
    assert run(code) == shown
