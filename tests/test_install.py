"""The Makefile's installation where it cannot work. (CI installs for real.)"""

import shutil
import subprocess

from tests import ROOT


def test_without_python_3_11_and_without_a_network_it_says_what_is_needed(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    done = subprocess.run(
        ["make", "PYTHON=false", "install"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "CPython 3.11 is needed" in done.stderr
    assert "make PYTHON=python3.11" in done.stderr and not (tmp_path / ".venv").exists()
