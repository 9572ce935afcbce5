"""Is upstream what the engine was written for? Which version is here, and is all that we rely on
unchanged?

    warnings = require(check(installed()))     # the engine, before it starts anything

contract.yaml has the pins, and a digest with its reason for all that we extend, replace, call or
read. Sources are parsed, never imported. For a new pin: `tools/check_upstream.py --write`, then
read what changed between the two.
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

from mindspeed_qerl.common.errors import ConfigError, EngineError

TABLE = Path(__file__).with_suffix(".yaml")
# The names that upstream's `verifier` knows; it skips any other without a word, so we compare names
# with these first.
UPSTREAM_VERIFIERS = (
    "acc",
    "format",
    "step",
    "strict_format",
    "base_acc",
    "math_17k_acc",
    "acc_for_dapo",
    "acc_for_ppo",
    "math_verify_reward",
    "retool_reward",
)
GENERATED = ("_version.py", "_build_info.py")  # written when vllm-ascend is installed
# Fields that differ between Python versions, or that do not change what the code does.
IGNORED_FIELDS = ("ctx", "kind", "type_comment", "type_params")


@dataclass(frozen=True)
class Pin:
    """The version of a repository that the engine was written for. content, others (by name): from
    `content_of`.
    """

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
ENTRIES = {
    file: {"": entry} if isinstance(entry, str) else entry
    for file, entry in _table["files"].items()
}


@dataclass(frozen=True)
class Finding:
    """An entry beside its source. change: "", "changed" or "gone"; digest, line: of the source."""

    file: str
    name: str
    why: str
    change: str
    digest: str
    line: int

    def __str__(self) -> str:
        return (
            f"{self.change or 'same'} {self.file}:{self.line} {self.name or '(whole)'}: {self.why}"
        )


@dataclass(frozen=True)
class Report:
    """One repository that is here. unused: more copies, later on the path. content: from
    `content_of`.
    """

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

    @property
    def version(self) -> str:
        """In words."""
        if self.at_pin:
            return str(self.pin)
        if self.commit == self.pin.commit:
            return f"{self.pin} with edited files"
        names = [name for name, content in self.pin.others.items() if content == self.content]
        name = names[0] if names else "an unknown version"
        commit = self.commit[:7] if self.commit else "no git checkout"
        return f"{name} ({commit}), not {self.pin}"

    def __str__(self) -> str:
        unused = f"; not used, later on the path: {', '.join(map(str, self.unused))}"
        count = len(self.findings)
        return (
            f"{self.pin.title} in {self.root} is {self.version}{unused if self.unused else ''}; "
            f"{count - len(self.changed)} of {count} things that the engine relies on are unchanged"
        )


def check(copies: Mapping[str, Sequence[Path]]) -> list[Report]:
    """Compare sources with contract.yaml. copies: keys of PINS -> folders that hold the package;
    the first counts, and it is a ConfigError if that one does not.
    """
    reports = []
    for package, (root, *unused) in copies.items():
        if not (root / package).is_dir():
            raise ConfigError(
                f"{root} holds no folder {package}: give a checkout of {PINS[package].title}"
            )
        findings = []
        for file in ENTRIES:
            if file.split("/")[0].replace("cli", "mindspeed_rl") == package:
                findings += compare(root, file)
        commit, content = commit_of(root), content_of(root / package)
        reports.append(Report(PINS[package], root, unused, commit, content, findings))
    return reports


def compare(root: Path, file: str) -> Iterator[Finding]:
    """A finding for each entry of one file below `root`; all are gone if it cannot be read as
    Python.
    """
    try:
        module = ast.parse((root / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        module = ast.Module([], [])
    for name, entry in ENTRIES[file].items():
        expected, why = entry.split(" ", 1)
        nodes = definitions(module, name)
        change, here = "", digest(nodes)
        if here != expected:
            change = "changed" if nodes else "gone"
        line = nodes[-1].lineno if nodes and name else 1
        yield Finding(file, name, why, change, here, line)


def require(reports: Sequence[Report]) -> list[str]:
    """Warnings: not the pin, though all that we rely on is unchanged, or a second copy on the path.
    EngineError: something that we rely on changed: the version that is here, what changed, where,
    why we need it.
    """
    faults = []
    for report in reports:
        if report.changed:
            faults += [report, *report.changed]
    if faults:
        raise EngineError(
            "upstream does not fit: the engine relies on what is changed or gone in it. Put the "
            "pins first on PYTHONPATH (docs/ascend.md)\n  " + "\n  ".join(map(str, faults))
        )
    return [str(report) for report in reports if report.unused or not report.at_pin]


def installed() -> dict[str, list[Path]]:
    """Keys of PINS -> the folders that hold the package, the one that Python takes first; imports
    nothing.
    """
    copies = {}
    for package in PINS:
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        folders += [f"{entry or '.'}/{package}" for entry in sys.path]
        # Megatron has no __init__.py: any folder of its name would count as a part of it.
        roots = [
            folder.resolve().parent
            for folder in map(Path, folders)
            if (folder / "__init__.py").is_file() or (folder / "core").is_dir()
        ]
        if roots:
            copies[package] = list(dict.fromkeys(roots))
    return copies


def upstream_versions() -> dict[str, str]:
    """Title of each installed repository -> its commit, or "sha256:..." of its files: without git,
    or edited.
    """
    versions = {}
    for report in check(installed()):
        is_commit = report.commit and (report.at_pin or report.commit != report.pin.commit)
        versions[report.pin.title] = report.commit if is_commit else f"sha256:{report.content}"
    return versions


def commit_of(root: Path) -> str | None:
    """The commit of the git checkout whose top folder is `root`; None if it is none, or git is not
    there.
    """
    command = ["git", "-C", str(root), "rev-parse", "--show-prefix", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    prefix, commit = done.stdout.split("\n")[:2]
    # site-packages inside another project's checkout have no commit of their own
    return None if prefix else commit


def content_of(folder: Path) -> str:
    """12 hex digits over names and bytes of the Python files below `folder`, except those an
    installation writes.
    """
    hashes = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.py")
        if path.name not in GENERATED
    }
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:12]


def definitions(scope: ast.AST, name: str) -> list[ast.stmt]:
    """The functions, classes or assignments of a qualified name, [] if there are none; the body of
    `scope` for "".

    >>> module = ast.parse("class C:\\n    N: int = 1\\n    N = 2")
    >>> [node.lineno for node in definitions(module, "C.N")]
    [2, 3]
    """
    if not name:
        return scope.body
    first, _, rest = name.partition(".")
    found = [statement for statement in scope.body if first in _names(statement)]
    return definitions(found[-1], rest) if found and rest else found


def _names(statement: ast.stmt) -> list[str]:
    """What a statement defines; a definition below an if or try is none."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [
        getattr(statement, "name", None),
        *(target.id for target in targets if isinstance(target, ast.Name)),
    ]


def digest(statements: list[ast.stmt]) -> str:
    """12 hex digits over syntax trees, without comments, docstrings and layout; the same on every
    Python from 3.10.

    >>> plain, other = "def f(): return 1", "def f():\\n 'Docs.'\\n return (1)"
    >>> digest(ast.parse(plain).body) == digest(ast.parse(other).body)
    True
    """
    return hashlib.sha256("".join(map(repr, _canonical(statements))).encode()).hexdigest()[:12]


def _canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, without positions, docstrings and what only some Python
    versions record.
    """
    if isinstance(node, list):
        return tuple(_canonical(each) for each in node if not _is_comment(each))
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty parts in it
        node = ast.JoinedStr([part for part in node.values if getattr(part, "value", None) != ""])
    return type(node).__name__, tuple(
        (name, _canonical(value))
        for name, value in ast.iter_fields(node)
        if name not in IGNORED_FIELDS and value not in (None, [])
    )


def _is_comment(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
