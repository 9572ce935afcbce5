"""Each kind of clause holds on a small source and is broken by the smallest change that matters, and the finding says which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.ascend.clauses import (
    Attributes,
    Broken,
    Class,
    Dictionary,
    Function,
    Globals,
    Source,
    Unchanged,
    Without,
    digest,
    find,
)
from mindspeed_qerl.ascend.contract import CONTRACT, PINS, UpstreamMismatch, check, commit_of, repository, require

ROOT = Path(__file__).parents[2]
FILE = "mindspeed_rl/worker.py"
WORKER = '''
import os
from engines import Engine
try:
    import fast
except ImportError:
    fast = None

REGISTRY = {"a": Engine, Engine.name: lambda config: config.npus}

@remote(npus=0.7)
class Worker(Base, Mixin):
    """Docstring."""

    def __init__(self, config):
        self.config = config
        self.step: int = 0

    def build(self, path: str, *, tp: int = 1, **kwargs) -> Engine:
        known = {"x": 1}
        engine = Engine(path)
        engine.load(config=self.config)
        if tp > 1:
            engine.split(tp)
        return engine

    @staticmethod
    def rank(of):
        return of

def registry():
    return {"a": REGISTRY}
'''


def look(clause, source):
    """The line that keeps the promise, or what was found instead."""
    try:
        return clause.look(ast.parse(source))
    except Broken as broken:
        return broken.found


BUILD = "Worker.build"
CALLED = Function(FILE, BUILD, "", called="build('p', tp=2)")
REPLACED = Function(FILE, BUILD, "", signature="self, path, *, tp=1, **kwargs")
STATIC = Function(FILE, "Worker.rank", "", called="rank(0)", decorator="staticmethod")
EXTENDED = Class(FILE, "Worker", "", bases=("Base", "Mixin"), decorator="remote(npus=0.7)")
STORED = Attributes(FILE, "Worker", "", names=frozenset({"config", "step"}))
REGISTRY = Dictionary(FILE, "REGISTRY", "", entries={"a": "Engine", "Engine.name": "lambda config: config.npus"},
                      absent=frozenset({"c"}))
LOCAL = Dictionary(FILE, f"{BUILD}.known", "", entries={"x": None}, exactly=True)
RETURNED = Dictionary(FILE, "registry.return", "", entries={"a": None})
LOOKED_UP = Globals(FILE, BUILD, "", names=("Engine",))
LOADS = Source(FILE, BUILD, "", snippets=("engine.load(config=self.config)",))
ORDER = Source(FILE, BUILD, "", snippets=("known = {'x': 1}", "engine = Engine(path)"))
STATEMENT = Source(FILE, BUILD, "", snippets=("if tp > 1:\n    engine.split(tp)",))
OF_MODULE = Source(FILE, "", "", snippets=("fast = None",))
SILENT = Without(FILE, BUILD, "", word="shard")

# clause, what is changed in WORKER, into what, what the finding says then
CASES = [
    (CALLED, "*, tp: int = 1", "*, sp: int", "missing a required argument: 'sp'"),
    (CALLED, "path: str, *, tp: int = 1, **kwargs", "path", "keyword argument 'tp'"),
    (CALLED, "path: str, ", "", "too many positional arguments"),
    (CALLED, "def build", "def built", "Worker has no build; the nearest name is built"),
    (REPLACED, "tp: int = 1", "tp: int = 2", "its parameters are (self, path, *, tp=2, **kwargs)"),
    (REPLACED, "path: str", "path: str, mode", "(self, path, mode, *"),
    (STATIC, "@staticmethod", "@classmethod", "its decorators: @classmethod"),
    (STATIC, "rank(of)", "rank(self, of)", "missing a required argument: 'of'"),
    (EXTENDED, "(Base, Mixin)", "(Mixin, Base)", "its bases are (Mixin, Base)"),
    (EXTENDED, "0.7", "0.5", "its decorators: @remote(npus=0.5)"),
    (EXTENDED, "class Worker(Base, Mixin):", "def Worker():", "Worker is a FunctionDef"),
    (STORED, "self.step", "self.steps", "it does not set step"),
    (REGISTRY, '"a": Engine', '"b": Engine', "'a' is missing"),
    (REGISTRY, '"a": Engine', '"a": Worker', "'a' is Worker, not Engine"),
    (REGISTRY, "config.npus", "config.nodes", "'Engine.name' is lambda config: config.nodes"),
    (REGISTRY, '{"a": E', '{"c": 0, "a": E', "'c' is there already: 0"),
    (REGISTRY, "REGISTRY = {", "REGISTRIES = {", "there is no dictionary REGISTRY"),
    (LOCAL, '{"x": 1}', '{"x": 1, "y": 2}', "'y' is new"),
    (LOCAL, '{"x": 1}', "dict(x=1)", "known is no dictionary display: dict(x=1)"),
    (RETURNED, 'return {"a"', 'return {"b"', "'a' is missing"),
    (LOOKED_UP, "from engines import Engine", "import engines", "Engine is not a name of the module"),
    (LOOKED_UP, 'known = {"x": 1}', "from engines import Engine", "Engine is bound inside the function"),
    (LOOKED_UP, "path: str", "Engine", "Engine is bound inside the function"),
    (LOOKED_UP, "engine = Engine(path)", "engine = self.make(path)", "Engine is not used"),
    (LOADS, "(config=self.config)", "(self.config)", "does not occur; the nearest is `engine.load(self.config)`"),
    (ORDER, 'known = {"x": 1}\n        engine = Engine(path)', 'engine = Engine(path)\n        known = {"x": 1}',
     "`engine = Engine(path)` comes before `known = {'x': 1}`"),
    (STATEMENT, "engine.split(tp)", "engine.split()", "does not occur"),
    (OF_MODULE, "fast = None", "fast = 0", "`fast = None` does not occur"),
    (SILENT, "engine.split(tp)", "engine.split(shards=tp)", "it mentions shard"),
    (SILENT, '{"x": 1}', '{"resharding": 1}', "it mentions shard"),
]


@pytest.mark.parametrize(("clause", "old", "new", "expected"), CASES)
def test_a_clause_holds_and_can_be_broken(clause, old, new, expected):
    assert WORKER.count(old) == 1
    assert isinstance(look(clause, WORKER), int)
    assert expected in look(clause, WORKER.replace(old, new))


def test_a_kept_promise_names_its_line():
    lines = WORKER.split("\n")
    line = look(Source(FILE, BUILD, "", snippets=("engine.split(tp)", "return engine")), WORKER)
    assert lines[line - 1].strip() == "engine.split(tp)"


def test_what_does_not_change_the_code_breaks_nothing():
    """Layout, quotes, comments, annotations and docstrings."""
    same = WORKER.replace('"a"', "'a'").replace("(config=self.config)", "(  # why\n            config=(self.config))")
    same = same.replace("path: str", "path: Path").replace('"""Docstring."""', '"""Another."""')
    for clause, *_ in CASES:
        assert isinstance(look(clause, same), int), clause


def test_unchanged_sees_code_and_nothing_else():
    def of(source):
        return digest(find(ast.parse(source), "f"))

    first = of('def f(a):\n    """One."""\n    return a + 1\n')
    assert first == of('def f(a):  # a comment\n    """Two."""\n    return (a\n            + 1)\n')
    assert first != of('def f(a):\n    """One."""\n    return a + 2\n')
    assert first != of("def f(a=0):\n    return a + 1\n")
    # The same on every Python, so it may be written into the contract.
    assert first == "76b32ee085a9"
    assert look(Unchanged(FILE, "f", "", digest=first), "def f(a):\n    return a + 1\n") == 1
    assert "digest" in look(Unchanged(FILE, "f", "", digest=first), "def f(a):\n    return a - 1\n")


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "mindspeed_rl").mkdir()
    (tmp_path / FILE).write_text(WORKER)
    return tmp_path


def test_findings_say_where_and_what_instead(checkout):
    clauses = [Function(FILE, BUILD, "we call it", called="build('p')"), Function(FILE, BUILD, "we call it", called="build()"),
               Class("mindspeed_rl/gone.py", "Gone", "we extend it"), Class("megatron/core/x.py", "X", "we read it")]
    (checkout / "mindspeed_rl/syntax.py").write_text("x = (\n")
    clauses.append(Source("mindspeed_rl/syntax.py", "", "we read it", snippets=("x",)))
    holds, broken, gone, not_given, syntax = check({"mindspeed_rl": checkout}, clauses)
    line = WORKER.split("\n").index("    def build(self, path: str, *, tp: int = 1, **kwargs) -> Engine:") + 1
    assert (holds.status, holds.where, holds.found) == ("holds", f"{FILE}:{line}", "")
    assert (broken.status, broken.where) == ("broken", f"{FILE}:{line}")
    assert (gone.status, gone.where, gone.found) == ("broken", "mindspeed_rl/gone.py", "there is no such file")
    assert (not_given.status, not_given.found) == ("not checked", "Megatron-LM was not given")
    assert syntax.status == "broken"
    assert "cannot be parsed" in syntax.found

    require([holds, not_given])
    with pytest.raises(UpstreamMismatch) as refusal:
        require([holds, broken, gone, not_given])
    for text in ("2 broken promises", "MindSpeed-RL 05a90d7 (branch master)", broken.where, "missing a required argument: 'path'",
                 "promised: build()", "why: we call it", "mindspeed_rl/gone.py", "why: we extend it"):
        assert text in str(refusal.value)
    assert "Megatron-LM" not in str(refusal.value)


def test_wrong_roots_are_refused(checkout):
    with pytest.raises(ValueError, match="'verl'; known: mindspeed_rl, mindspeed_llm"):
        check({"verl": checkout})
    with pytest.raises(FileNotFoundError, match="holds no folder mindspeed: give a checkout of MindSpeed,"):
        check({"mindspeed": checkout})


def test_the_table_is_well_formed():
    """Every clause belongs to a pinned repository, gives a reason, and can say what it promises."""
    for clause in CONTRACT:
        assert repository(clause) in PINS
        assert clause.file.endswith(".py")
        assert clause.why
        assert clause.promise
    assert len(set(map(repr, CONTRACT))) == len(CONTRACT)
    assert {repository(clause) for clause in CONTRACT} == set(PINS)


def test_installed_packages_are_found_without_being_imported(tmp_path):
    """In a Python without site-packages: nothing but the standard library is needed."""
    for package in ("a/mindspeed_rl/__init__.py", "a/megatron/core/__init__.py", "b/megatron/training/__init__.py"):
        (tmp_path / package).parent.mkdir(parents=True)
        (tmp_path / package).write_text("raise RuntimeError('imported')")
    program = (f"import sys; sys.path[:0] = ['{tmp_path}/a', '{tmp_path}/b', '{ROOT}']\n"
               "from mindspeed_qerl.ascend.contract import check, installed_roots\n"
               "roots = installed_roots(); print({key: root.name for key, root in roots.items()})\n"
               "print({finding.status for finding in check(roots)})")
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, env={})
    assert done.stdout.split("\n")[0] == "{'mindspeed_rl': 'a', 'megatron': 'b'}"
    assert "broken" in done.stdout
    assert "not checked" in done.stdout


def test_a_commit_is_named_for_a_checkout_only(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    try:
        subprocess.run([*git, "init", "--quiet"], check=True)
    except OSError:
        pytest.skip("git is not there")
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
    (tmp_path / "site-packages").mkdir()
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit_of(tmp_path) == head
    assert commit_of(tmp_path / "site-packages") is None


def run_tool(**folders):
    arguments = [f"--{name.replace('_', '-')}={folder}" for name, folder in folders.items()]
    command = [sys.executable, ROOT / "tools/check_upstream.py", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_tool_says_what_is_broken_and_what_was_not_checked(checkout):
    for package in ("mindspeed_llm", "mindspeed"):
        (checkout / package).mkdir()
    done = run_tool(mindspeed_rl=checkout, mindspeed_llm=checkout, mindspeed=checkout)
    assert done.returncode == 1
    assert f"MindSpeed-RL  {checkout}, not a git checkout\n  broken  cli/train_grpo.py\n          train(config)" in done.stdout
    assert "vllm-ascend  not given, so not checked" in done.stdout
    assert done.stdout.strip().endswith("not checked")


def test_the_tool_refuses_a_missing_folder(checkout):
    done = run_tool(mindspeed_rl=checkout, mindspeed_llm=checkout / "nowhere", mindspeed=checkout)
    assert done.returncode == 2
    assert f"{checkout}/nowhere holds no folder mindspeed_llm" in done.stderr
    assert run_tool(mindspeed_rl=checkout).returncode == 2
