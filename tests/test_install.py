"""The Makefile's installation where it cannot work (CI installs for real), and what the package
requires.
"""

import ast
import email
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


# brought by the process that the package runs in: a trainer, MindSpeed-RL's environment, vLLM's own
# requirements, CANN
HOSTS = {"acl", "einops", "mindspeed", "mindspeed_llm", "mindspeed_rl", "swift", "verl"}
HOSTS |= {"vllm_ascend", "zmq"}


@pytest.fixture(scope="module")
def required(tmp_path_factory):
    """What a wheel of this checkout requires: names by extra, "" being without any."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("cli", "tools", "configs", "mindspeed_qerl", "requirements"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, copy)
    program = "from setuptools.build_meta import *; prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", program], cwd=copy, check=True, capture_output=True)
    (metadata,) = copy.glob("*.dist-info/METADATA")
    found = {}
    for line in email.message_from_string(metadata.read_text()).get_all("Requires-Dist"):
        requirement = Requirement(line)
        extra = re.search(r'extra == "(\w+)"', str(requirement.marker or ""))
        found.setdefault(extra[1] if extra else "", set()).add(canonicalize_name(requirement.name))
    return found


def imported_packages():
    """Names of the distributions, the hosts' left out, that the package, cli/ and tools/ import,
    also inside functions, each with a file that does.
    """
    of_module = packages_distributions()
    found = {}
    for folder in ("mindspeed_qerl", "cli", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            if "stand_ins" in file.parts:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    modules = [node.module]
                heads = {module.partition(".")[0] for module in modules}
                for head in heads - HOSTS - sys.stdlib_module_names - {"mindspeed_qerl"}:
                    (name,) = set(of_module[head])
                    found[canonicalize_name(name)] = file
    return found


def test_without_an_extra_it_brings_numpy_alone(required):
    assert required[""] == {"numpy"}
    assert required["report"] < required["npu"] < required["tools"] < required["local"]


def test_every_package_that_is_imported_is_in_an_extra(required):
    missing = imported_packages().keys() - required[""] - required["local"]
    assert not missing, missing


@pytest.mark.parametrize("extra, locked", [("npu", "upstream"), ("local", "local")])
def test_what_an_extra_brings_is_in_the_locked_list(required, extra, locked):
    lines = (ROOT / "requirements" / f"{locked}.txt").read_text().splitlines()
    listed = {canonicalize_name(re.split("[ =<>@]", line)[0]) for line in lines if line}
    assert (required[""] | required[extra]) - {"torch"} <= listed


def test_in_a_process_with_torch_and_vllm_the_plugin_needs_no_more(tmp_path):
    """Noise, proof, rounding and report, everything else of the extras blocked; verl and ms-swift,
    which import such things themselves, are stand-ins.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "integrations" / "bare.py", tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 of 2 weights" in done.stdout, done.stderr
    assert "the noise did not end" in done.stdout and done.returncode == 1
    assert "no picture: " in done.stderr and "pip install '.[report]'" in done.stderr
