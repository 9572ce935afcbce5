"""Programs of this checkout started in this process, which has imported what they need."""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from unittest.mock import patch

from tests import ROOT


def run_tool(name, *arguments):
    """Of tools/NAME.py."""
    return run_program(f"tools/{name}.py", *arguments)


def run_program(file, *arguments):
    """returncode, stdout and stderr of the command."""
    script = str(ROOT / file)
    command = [script, *map(str, arguments)]
    with (
        patch.object(sys, "argv", command),
        redirect_stdout(io.StringIO()) as stdout,
        redirect_stderr(io.StringIO()) as stderr,
    ):
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
    return SimpleNamespace(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue())
