"""docs/aqn.md: the Python example prints what the text block below it shows."""

import re
import subprocess
import sys

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


def test_the_example_prints_what_the_page_shows():
    [(code, shown)] = EXAMPLES
    assert run(code) == shown
