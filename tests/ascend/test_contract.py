"""The digest sees code and nothing else; a report says which version of upstream is there and what
changed in it.
"""

import ast
import importlib.util
import re
import shutil
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
    commit_of,
    content_of,
    definitions,
    digest,
    installed,
    require,
    upstream_versions,
)
from mindspeed_qerl.common.errors import ConfigError, EngineError

ROOT = Path(__file__).parents[2]
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


def digests(source: str) -> dict[str, str]:
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
    ("old", "new", "seen"),
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


PIN = Pin("MindSpeed-RL", "0123456789", "branch master", "", {})


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A made-up MindSpeed-RL in a folder, which is the pin."""
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
    entries = {
        name: f"{digests(WORKER)[name]} {why}"
        for name, why in (("Worker.build", "we call it"), ("registry", "we read it"))
    }
    main = digest(ast.parse("def main(): pass").body)
    monkeypatch.setattr(
        contract, "ENTRIES", {FILE: entries, "cli/train.py": {"": f"{main} we start it"}}
    )
    set_pin(monkeypatch, root)
    return root


def set_pin(monkeypatch, root, **changes):
    pin = Pin(**{**vars(PIN), "content": content_of(root / "mindspeed_rl"), **changes})
    monkeypatch.setattr(contract, "PINS", {**PINS, "mindspeed_rl": pin})


def replace(path, old, new):
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def report_of(*roots):
    (report,) = check({"mindspeed_rl": roots})
    return report


def test_the_pin_needs_no_word(checkout):
    report = report_of(checkout)
    assert report.at_pin and not report.changed and require([report]) == []
    assert str(report) == (
        f"MindSpeed-RL in {checkout} is the pin 0123456 (branch master); "
        "3 of 3 things that the engine relies on are unchanged"
    )
    (checkout / "mindspeed_rl" / "_build_info.py").write_text(
        "built = 'here'"
    )  # an installation writes it
    assert report_of(checkout).at_pin


def test_another_version_with_all_that_we_rely_on_unchanged_is_a_warning(checkout, monkeypatch):
    before = content_of(checkout / "mindspeed_rl")
    replace(checkout / OTHER, "x = 1", "x = 2")
    (warning,) = require([report_of(checkout)])
    assert (
        "is an unknown version (no git checkout), not the pin 0123456 (branch master); 3 of 3 "
        "things" in warning
    )
    others = {"v1": "0" * 12, "v2": content_of(checkout / "mindspeed_rl")}
    set_pin(monkeypatch, checkout, content=before, others=others)
    (warning,) = require([report_of(checkout)])
    assert "is v2 (no git checkout), not the pin" in warning


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (FILE, "tp: int = 1", "tp: int = 2", f"changed {FILE}:16 Worker.build: we call it"),
        (FILE, "def build", "def built", f"gone {FILE}:1 Worker.build: we call it"),
        (FILE, "return inner()", "return inner", f"changed {FILE}:22 registry: we read it"),
        ("cli/train.py", "pass", "return 1", "changed cli/train.py:1 (whole): we start it"),
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


@pytest.fixture
def git(checkout):
    """git(command...) in the checkout, whose files are committed."""

    def run(*command):
        whole = ["git", "-C", checkout, "-c", "user.name=t", "-c", "user.email=t@t", *command]
        return subprocess.run(whole, capture_output=True, text=True, check=True).stdout.strip()

    if not shutil.which("git"):
        pytest.skip("git is not there")
    run("init", "--quiet")
    run("add", ".")
    run("commit", "--quiet", "--message", "one")
    return run


def test_a_commit_is_named_for_a_checkout_only(checkout, git):
    (checkout / "site-packages").mkdir()
    assert commit_of(checkout) == git("rev-parse", "HEAD")
    assert commit_of(checkout / "site-packages") is None


def test_a_checkout_at_another_commit_and_an_edited_one(checkout, git, monkeypatch):
    first = git("rev-parse", "HEAD")
    set_pin(monkeypatch, checkout, commit=first)
    pin = contract.PINS["mindspeed_rl"]
    monkeypatch.setattr(sys, "path", [str(checkout), *sys.path])
    assert report_of(checkout).at_pin and upstream_versions()["MindSpeed-RL"] == first

    replace(checkout / OTHER, "x = 1", "x = 2")
    assert (
        f"is the pin {first[:7]} (branch master) with edited files; 3 of 3"
        in require([report_of(checkout)])[0]
    )
    edited = f"sha256:{content_of(checkout / 'mindspeed_rl')}"
    assert upstream_versions()["MindSpeed-RL"] == edited

    git("commit", "--quiet", "--all", "--message", "two")
    second = git("rev-parse", "HEAD")
    assert f"is an unknown version ({second[:7]}), not {pin};" in require([report_of(checkout)])[0]
    assert upstream_versions()["MindSpeed-RL"] == second
    shutil.rmtree(checkout / ".git")
    assert upstream_versions()["MindSpeed-RL"] == edited


def test_the_first_of_two_copies_counts(checkout, tmp_path, monkeypatch):
    second = tmp_path / "second"
    shutil.copytree(checkout, second)
    replace(checkout / FILE, "tp: int = 1", "tp: int = 2")
    set_pin(monkeypatch, second)
    monkeypatch.setattr(sys, "path", [str(second), str(checkout), str(second), *sys.path])
    assert installed()["mindspeed_rl"] == [second, checkout]
    report = report_of(*installed()["mindspeed_rl"])
    assert (
        report.at_pin
        and require([report])[0].count(f"; not used, later on the path: {checkout};") == 1
    )
    monkeypatch.setattr(sys, "path", [str(checkout), str(second), *sys.path])
    with pytest.raises(
        EngineError, match=f"in {checkout} is an unknown .* not used, later on the path: {second};"
    ):
        require(check({"mindspeed_rl": installed()["mindspeed_rl"]}))


def test_a_folder_without_its_package_is_refused(checkout):
    with pytest.raises(
        ConfigError, match="holds no folder mindspeed: give a checkout of MindSpeed$"
    ):
        check({"mindspeed": [checkout]})


def test_the_table_is_well_formed():
    for file, entries in ENTRIES.items():
        assert file.endswith(".py") and file.split("/")[0] in {*PINS, "cli"}
        assert all(re.fullmatch(r"[0-9a-f]{12} \S.{4,}", entry) for entry in entries.values()), file
    assert {file.split("/")[0] for file in ENTRIES} == {*PINS, "cli"}
    for pin in PINS.values():
        assert re.fullmatch("[0-9a-f]{40}", pin.commit) and pin.content not in pin.others.values()
        assert all(
            re.fullmatch("[0-9a-f]{12}", content) for content in (pin.content, *pin.others.values())
        )


def test_installed_packages_are_found_without_being_imported(tmp_path):
    """megatron has no __init__.py: Python takes megatron.core from the first folder that has it."""
    for package in (
        "a/mindspeed_rl/__init__.py",
        "a/megatron/training/__init__.py",
        "b/megatron/core/__init__.py",
        "c/megatron/core/__init__.py",
        "c/megatron/training/__init__.py",
    ):
        (tmp_path / package).parent.mkdir(parents=True)
        (tmp_path / package).write_text("raise RuntimeError('imported')")
    program = (
        f"import sys; sys.path[:0] = [f'{tmp_path}/{{name}}' for name in 'abc'] + ['{ROOT}']\n"
        "from mindspeed_qerl.ascend.contract import check, installed\n"
        "copies = installed(); roots = [*copies['mindspeed_rl'][:1], *copies['megatron'][:2]]\n"
        "print([root.name for root in roots])\n"
        "print({finding.change for report in check(copies) for finding in report.findings})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={}
    )
    assert done.stdout.splitlines() == ["['a', 'b', 'c']", "{'gone'}"]


def test_the_engine_names_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(engine, "installed", lambda: {"mindspeed_rl": [ROOT]})
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
    version = "an unknown version (no git checkout), not the pin 05a90d7 (branch master)"
    assert f"MindSpeed-RL in {checkout} is {version}; 0 of " in done.stdout
    assert "\n  gone cli/train_grpo.py:1 train: we start this task" in done.stdout
    assert "\nvllm-ascend is not there, so not compared\n" in done.stdout


def test_a_new_pin_is_one_command(checkout, tool, tmp_path, monkeypatch, capsys):
    """The digests of what is there take the place of the old ones, everything else stays as it was
    written.
    """
    text = (
        "# why\npins: {commit: '0123456789', content: "
        f"'{content_of(checkout / 'mindspeed_rl')}'}}\nfiles:\n  {FILE}:\n"
        + "".join(f"    {name}: {entry}\n" for name, entry in contract.ENTRIES[FILE].items())
        + f"  cli/train.py: {contract.ENTRIES['cli/train.py']['']}\n"
    )
    monkeypatch.setattr(tool, "TABLE", tmp_path / "contract.yaml")
    monkeypatch.setattr(tool, "ENTRIES", contract.ENTRIES)
    tool.TABLE.write_text(text)
    replace(checkout / FILE, "tp: int = 1", "tp: int = 2")
    replace(checkout / "cli/train.py", "pass", "return 1")
    replace(checkout / FILE, "def registry", "def registries")
    assert tool.write([report_of(checkout)]) == 0
    before, after = text.splitlines(), tool.TABLE.read_text().splitlines()
    assert [
        number
        for number, (one, other) in enumerate(zip(before, after, strict=True))
        if one != other
    ] == [1, 4, 6]
    assert f"content: '{content_of(checkout / 'mindspeed_rl')}'" in after[1]
    source = (checkout / FILE).read_text()
    assert after[4] == f"    Worker.build: {digests(source)['Worker.build']} we call it"
    assert f"gone {FILE}:1 registry: we read it" in capsys.readouterr().err
