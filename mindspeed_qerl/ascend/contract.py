"""Is upstream what the engine was written for? Which version is here, and is all that we rely on unchanged?

    warnings = require(check(installed()))     # the engine, before it starts anything

contract.yaml holds the pins, and a digest with its reason for all that we extend, replace, call or read. Sources are parsed,
never imported. For a new pin: `tools/check_upstream.py --write`, then read what changed between the two.
"""

import ast
import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.errors import ConfigError, EngineError

TABLE = Path(__file__).with_suffix(".yaml")
# The names that upstream's `verifier` knows; any other it skips without a word, so names are checked against these first.
UPSTREAM_VERIFIERS = ("acc", "format", "step", "strict_format", "base_acc", "math_17k_acc", "acc_for_dapo", "acc_for_ppo",
                      "math_verify_reward", "retool_reward")
GENERATED = ("_version.py", "_build_info.py")  # written when vllm-ascend is installed
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Fields that differ between Python versions, or that do not change what the code does.
IGNORED_FIELDS = ("ctx", "kind", "type_comment", "type_params")


@dataclass(frozen=True)
class Pin:
    """The version of a repository that the engine was written for; `content` and `others` (by name) are from `content_of`."""

    title: str
    commit: str
    ref: str
    content: str
    others: Mapping[str, str]

    def __str__(self) -> str:
        return f"the pin {self.commit[:7]} ({self.ref})"


_table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
PINS = {package: Pin(**pin) for package, pin in _table["pins"].items()}
# file -> qualified name, "" for the whole file -> "digest reason"
ENTRIES = {file: {"": entry} if isinstance(entry, str) else entry for file, entry in _table["files"].items()}


@dataclass(frozen=True)
class Finding:
    """One entry beside its source. change: "", "changed" or "gone"; digest and line: what is there, if it is."""

    file: str
    name: str
    why: str
    change: str
    digest: str = ""
    line: int = 1

    def __str__(self) -> str:
        return f"{self.change or 'same'} {self.file}:{self.line} {self.name or '(whole)'}: {self.why}"


@dataclass(frozen=True)
class Report:
    """One repository that is here. unused: more copies, later on the path. commit: None without git. content: from `content_of`."""

    pin: Pin
    root: Path
    unused: Sequence[Path]
    commit: str | None
    content: str
    findings: Sequence[Finding]

    @property
    def changed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.change]

    @property
    def at_pin(self) -> bool:
        return self.content == self.pin.content and not self.changed

    def __str__(self) -> str:
        """"MindSpeed in DIR is v2.2.0_core_r0.12.1 (f321067), not the pin ...; 5 of 5 things that the engine relies on are unchanged"."""
        version = str(self.pin)
        if not self.at_pin and self.commit == self.pin.commit:
            version += " with edited files"
        elif not self.at_pin:
            names = (name for name, content in self.pin.others.items() if content == self.content)
            commit = self.commit[:7] if self.commit else "no git checkout"
            version = f"{next(names, 'an unknown version')} ({commit}), not {self.pin}"
        unused = f"; not used, later on the path: {', '.join(map(str, self.unused))}" if self.unused else ""
        same = f"{len(self.findings) - len(self.changed)} of {len(self.findings)}"
        return f"{self.pin.title} in {self.root} is {version}{unused}; {same} things that the engine relies on are unchanged"


def check(copies: Mapping[str, Sequence[Path]]) -> list[Report]:
    """Compare sources with contract.yaml.

    Args:
        copies: keys of PINS -> checkouts, or folders that the package's folder is in; the first one is compared.

    Raises:
        ConfigError: a first folder without the package.
    """
    reports = []
    for package, (root, *unused) in copies.items():
        if not (root / package).is_dir():
            raise ConfigError(f"{root} holds no folder {package}: give a checkout of {PINS[package].title}, or the folder it is in")
        files = [file for file in ENTRIES if file.split("/")[0].replace("cli", "mindspeed_rl") == package]
        findings = [finding for file in files for finding in compare(root, file)]
        reports.append(Report(PINS[package], root, unused, commit_of(root), content_of(root / package), findings))
    return reports


def compare(root: Path, file: str) -> Iterator[Finding]:
    """A finding for each entry of one file below `root`; all are gone if it cannot be read as Python."""
    try:
        module = ast.parse((root / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        module = ast.Module([], [])
    for name, entry in ENTRIES[file].items():
        expected, why = entry.split(" ", 1)
        if nodes := definitions(module, name):
            here = digest(nodes)
            yield Finding(file, name, why, "changed" if here != expected else "", here, nodes[-1].lineno if name else 1)
        else:
            yield Finding(file, name, why, "gone")


def require(reports: Sequence[Report]) -> list[str]:
    """Warnings: not the pin, though all that we rely on is unchanged, or a second copy on the path.

    Raises:
        EngineError: something that we rely on changed: which version is here, and what changed, where, and why we need it.
    """
    if faults := [line for report in reports if report.changed for line in (report, *report.changed)]:
        raise EngineError("upstream does not fit: the engine relies on what is changed or gone in it. Put the pins first on "
                          "PYTHONPATH (docs/ascend.md); `python tools/check_upstream.py --all` prints the whole table\n  "
                          + "\n  ".join(map(str, faults)))
    return [str(report) for report in reports if report.unused or not report.at_pin]


def installed() -> dict[str, list[Path]]:
    """Keys of PINS -> the folders that hold the package, the one that Python takes first; imports nothing."""
    copies = {}
    for package in PINS:
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:  # put into sys.modules by hand, without a spec
            continue
        taken = list(spec.submodule_search_locations or []) if spec else []
        folders = [Path(folder) for folder in (*taken, *(f"{entry or '.'}/{package}" for entry in sys.path))]
        # Megatron has no __init__.py: any folder of its name would count as a part of it.
        there = [folder for folder in folders if (folder / "__init__.py").is_file() or (folder / "core").is_dir()]
        if there:
            copies[package] = list(dict.fromkeys(folder.resolve().parent for folder in there))
    return copies


def upstream_versions() -> dict[str, str]:
    """Title of each repository that is installed -> its commit, without git or with edited files "sha256:..." of its files."""
    reports = check(installed())
    edited = [report for report in reports if report.commit == report.pin.commit and not report.at_pin]
    return {report.pin.title: f"sha256:{report.content}" if report in edited or not report.commit else report.commit
            for report in reports}


def commit_of(root: Path) -> str | None:
    """The commit of the git checkout whose top folder is `root`; None if it is none, or git is not there."""
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[:2]
    except (OSError, subprocess.CalledProcessError):
        return None
    # A package in the site-packages of another project's checkout has no commit of its own.
    return commit if Path(top) == Path(root).resolve() else None


def content_of(folder: Path) -> str:
    """12 hex digits over names and bytes of the Python files below `folder`, but for those that an installation writes."""
    hashes = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
              for path in folder.rglob("*.py") if path.name not in GENERATED}
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def definitions(scope: ast.AST, name: str) -> list[ast.stmt]:
    """The functions, classes or assignments of a qualified name, also below if and try; the whole body for "".

    >>> [node.lineno for node in definitions(ast.parse("if fast:\\n    N = 1\\nelse:\\n    N = 2"), "N")]
    [2, 4]
    """
    if not name:
        return scope.body
    first, _, rest = name.partition(".")
    found = [statement for statement in _statements(scope) if first in _names(statement)]
    return definitions(found[-1], rest) if found and rest else found


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of a body and of the blocks in it, but not those of functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.stmt, ast.excepthandler)):
            yield child
            yield from () if isinstance(child, SCOPES) else _statements(child)


def _names(statement: ast.AST) -> list[str]:
    if isinstance(statement, SCOPES):
        return [statement.name]
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def digest(statements: list[ast.stmt]) -> str:
    """12 hex digits over syntax trees, without comments, docstrings and layout; the same on every Python from 3.10.

    >>> digest(ast.parse("def f(a): return a").body) == digest(ast.parse("def f(a):\\n    'Docs.'\\n    return (a)").body)
    True
    """
    return hashlib.sha256("".join(map(repr, _canonical(statements))).encode()).hexdigest()[:12]


def _canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, without positions, statements that are a string, and what only some Python versions record."""
    if isinstance(node, list):
        return tuple(_canonical(each) for each in node if not _is_comment(each))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty parts in it
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in IGNORED_FIELDS and value not in (None, [])]
    return type(node).__name__, tuple((name, _canonical(value)) for name, value in fields)


def _is_comment(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
