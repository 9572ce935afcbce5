"""The digest sees code and nothing else; a report says which version of upstream is there and what
changed in it.
"""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.ascend import contract, engine
from mindspeed_qerl.ascend.contract import (
    ENTRIES,
    PINS,
    Pin,
    check,
    content_of,
    definitions,
    digest,
    installed,
    require,
)
from mindspeed_qerl.ascend.limits import versions
from mindspeed_qerl.common.errors import ConfigError, EngineError
from tests import ROOT

FILE, OTHER = "mindspeed_rl/worker.py", "mindspeed_rl/other.py"
WORKER = '''
import os
SPEED = 1
SPEED = 2

REGISTRY = {"a": os.name}
LIMIT: int = 4

@remote(npus=0.7)
class Worker(Base, Mixin):
    """Docstring."""

    def __init__(self, config):
        self.config = config

    def build(self, path: str, *, tp: int = 1) -> str:
        """Docstring."""
        if tp > 1:
            path = f"{path!r:>{tp}} of {tp:02d}"
        return path

def registry():
    def inner():
        return REGISTRY
    return inner()
'''
NAMES = (
    "SPEED",
    "REGISTRY",
    "LIMIT",
    "Worker",
    "Worker.__init__",
    "Worker.build",
    "registry",
    "registry.inner",
    "",
)


def digests(source):
    module = ast.parse(source)
    return {name: digest(definitions(module, name)) for name in NAMES}


def test_what_does_not_change_the_code_changes_no_digest():
    same = '"""Of the module."""\n' + WORKER.replace('"a"', "'a'").replace(
        "    def inner", "\n    # why\n    def inner"
    )
    same = same.replace("return path", "return (  # why\n            path)")
    same = same.replace('"""Docstring."""', '"""Another,\n    longer."""')
    assert same.count("# why") == 2 and same.count("Another") == 2
    assert digests(same) == digests(WORKER)


@pytest.mark.parametrize(
    "old, new, seen",
    [
        ("tp: int = 1", "tp: int = 2", {"Worker.build", "Worker"}),
        ("tp > 1", "tp >= 1", {"Worker.build", "Worker"}),
        (":02d", ":03d", {"Worker.build", "Worker"}),
        ("self.config = config", "self.configs = config", {"Worker.__init__", "Worker"}),
        ("npus=0.7", "npus=0.5", {"Worker"}),
        ("def build", "def built", {"Worker.build", "Worker"}),
        ('"a": ', '"b": ', {"REGISTRY"}),
        ("SPEED = 2", "SPEED = 3", {"SPEED"}),
        ("return REGISTRY", "return dict(REGISTRY)", {"registry.inner", "registry"}),
        ("import os\n", "import os.path as os\n", set()),
    ],
)
def test_a_digest_sees_each_change_of_its_code_and_of_no_other(old, new, seen):
    assert WORKER.count(old) == 1
    before, after = digests(WORKER), digests(WORKER.replace(old, new))
    assert {name for name in NAMES if before[name] != after[name]} == seen | {""}


def test_a_digest_is_the_same_on_every_python():
    """Known values: contract.yaml is written by one Python and read by others."""
    assert digest(ast.parse("def f(a):\n    return a + 1\n").body) == "76b32ee085a9"
    assert digest(ast.parse(WORKER).body) == "a778a9092209"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A made-up MindSpeed-RL in a folder, which is the pin, and the first one on Python's path."""
    root = tmp_path / "rl"
    files = {
        FILE: WORKER,
        OTHER: "x = 1\n",
        "mindspeed_rl/__init__.py": "",
        "cli/train.py": "def main(): pass\n",
    }
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    known = digests(WORKER)
    entries = {
        "Worker.build": f"{known['Worker.build']} we call it",
        "registry": f"{known['registry']} we read it",
    }
    main = digest(ast.parse("def main(): pass").body)
    monkeypatch.setattr(
        contract, "ENTRIES", {FILE: entries, "cli/train.py": {"": f"{main} we start it"}}
    )
    pin = Pin("MindSpeed-RL", "0123456789", "branch master", content_of(root / "mindspeed_rl"))
    monkeypatch.setattr(contract, "PINS", {**PINS, "mindspeed_rl": pin})
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    return root


def replace(path, old, new):
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def report_of(root):
    (report,) = check({"mindspeed_rl": root})
    return report


def test_the_pin_needs_no_word(checkout):
    assert installed()["mindspeed_rl"] == checkout
    report = report_of(checkout)
    assert report.at_pin and not report.changed and require([report]) == []
    assert str(report) == (
        f"MindSpeed-RL in {checkout} is the pin 0123456 (branch master); "
        "3 of 3 things that the engine relies on are unchanged"
    )
    # an installation writes it
    (checkout / "mindspeed_rl" / "_build_info.py").write_text("built = 'here'")
    assert report_of(checkout).at_pin and versions()["upstream"]["MindSpeed-RL"] == "0123456789"


def test_another_version_with_all_that_we_rely_on_unchanged_is_a_warning(checkout):
    replace(checkout / OTHER, "x = 1", "x = 2")
    content = f"sha256:{content_of(checkout / 'mindspeed_rl')}"
    (warning,) = require([report_of(checkout)])
    assert f"is another version ({content}), not the pin 0123456 (branch master); 3 of 3" in warning
    assert versions()["upstream"]["MindSpeed-RL"] == content


@pytest.mark.parametrize(
    "file, old, new, told",
    [
        (FILE, "tp: int = 1", "tp: int = 2", f"changed {FILE} Worker.build: we call it"),
        (FILE, "def build", "def built", f"gone {FILE} Worker.build: we call it"),
        (FILE, "return inner()", "return inner", f"changed {FILE} registry: we read it"),
        ("cli/train.py", "pass", "return 1", "changed cli/train.py (whole): we start it"),
    ],
)
def test_what_changed_is_named_with_its_reason(checkout, file, old, new, told):
    replace(checkout / file, old, new)
    report = report_of(checkout)
    assert not report.at_pin
    with pytest.raises(EngineError) as refusal:
        require([report])
    assert refusal.value.args[0].splitlines()[1:] == [f"  {report}", f"  {told}"]
    assert "2 of 3 things that the engine relies on are unchanged" in str(report)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("x = (")])
def test_all_of_a_file_that_cannot_be_read_is_gone(checkout, spoil):
    spoil(checkout / FILE)
    changed = [(finding.change, finding.name) for finding in report_of(checkout).changed]
    assert changed == [("gone", "Worker.build"), ("gone", "registry")]


def test_a_folder_without_its_package_is_refused(checkout):
    with pytest.raises(
        ConfigError, match="holds no folder mindspeed: give a checkout of MindSpeed$"
    ):
        check({"mindspeed": checkout})


def test_the_table_is_well_formed():
    for file, entries in ENTRIES.items():
        assert file.endswith(".py") and file.split("/")[0] in {*PINS, "cli"}
        assert all(re.fullmatch(r"[0-9a-f]{12} \S.{4,}", entry) for entry in entries.values()), file
    assert {file.split("/")[0] for file in ENTRIES} == {*PINS, "cli"}
    for pin in PINS.values():
        assert re.fullmatch("[0-9a-f]{40}", pin.commit) and re.fullmatch(
            "[0-9a-f]{12}", pin.content
        )


def test_installed_packages_are_found_without_being_imported(tmp_path, monkeypatch):
    """megatron has no __init__.py: Python takes megatron.core from the first folder that has it."""
    for file in (
        "a/mindspeed_rl/__init__.py",
        "a/megatron/training/__init__.py",
        "b/megatron/core/__init__.py",
        "c/megatron/core/__init__.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in "abc"])
    monkeypatch.delitem(sys.modules, "megatron", raising=False)
    roots = installed()
    assert roots == {"mindspeed_rl": tmp_path / "a", "megatron": tmp_path / "b"}
    assert {finding.change for report in check(roots) for finding in report.findings} == {"gone"}


def test_the_engine_names_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(engine, "installed", lambda: {"mindspeed_rl": ROOT})
    with pytest.raises(
        EngineError, match=r"vllm-ascend cannot be imported here\. .*NPUs install vllm-ascend "
    ):
        engine.check_upstream()


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location(
        "check_upstream", ROOT / "tools" / "check_upstream.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(*arguments):
    command = [sys.executable, ROOT / "tools/check_upstream.py", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_tool_says_what_changed_and_what_is_not_there(checkout):
    done = run_tool("--mindspeed-rl", checkout)
    assert done.returncode == 1
    assert f"MindSpeed-RL in {checkout} is another version (sha256:" in done.stdout
    assert "\n  gone cli/train_grpo.py train: we start this task" in done.stdout
    assert "\nvllm-ascend is not there, so not compared\n" in done.stdout


def test_a_new_pin_is_one_command(checkout, tool, tmp_path, monkeypatch, capsys):
    """The digests of what is there take the place of the old ones, everything else stays as it was
    written.
    """
    entries = "".join(f"    {name}: {entry}\n" for name, entry in contract.ENTRIES[FILE].items())
    text = (
        f"# why\npins: {{content: '{content_of(checkout / 'mindspeed_rl')}'}}\n  {FILE}:\n{entries}"
        f"  cli/train.py: {contract.ENTRIES['cli/train.py']['']}\n"
    )
    monkeypatch.setattr(tool, "TABLE", tmp_path / "contract.yaml")
    monkeypatch.setattr(tool, "ENTRIES", contract.ENTRIES)
    tool.TABLE.write_text(text)
    replace(checkout / FILE, "tp: int = 1", "tp: int = 2")
    replace(checkout / "cli/train.py", "pass", "return 1")
    replace(checkout / FILE, "def registry", "def registries")
    assert tool.write([report_of(checkout)]) == 0
    lines = zip(text.splitlines(), tool.TABLE.read_text().splitlines(), strict=True)
    content, build, start = [after for before, after in lines if before != after]
    assert content_of(checkout / "mindspeed_rl") in content and start.endswith(" we start it")
    known = digests((checkout / FILE).read_text())
    assert build == f"    Worker.build: {known['Worker.build']} we call it"
    assert f"gone {FILE} registry: we read it" in capsys.readouterr().err
