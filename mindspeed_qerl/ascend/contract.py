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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl.common.errors import ConfigError, EngineError
from mindspeed_qerl.common.files import sha256

TABLE = Path(__file__).with_suffix(".yaml")
GENERATED = ("_version.py", "_build_info.py")  # written when vllm-ascend is installed


@dataclass(frozen=True)
class Pin:
    """The version of a repository that the engine was written for. content: from `content_of`."""

    title: str
    commit: str
    ref: str
    content: str

    def __str__(self) -> str:
        return f"the pin {self.commit[:7]} ({self.ref})"


_table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
PINS = {package: Pin(**pin) for package, pin in _table["pins"].items()}
DISTRIBUTIONS = _table["distributions"]  # name -> version
# file -> qualified name, "" for the whole file -> "digest reason"
ENTRIES = {
    file: {"": entry} if isinstance(entry, str) else entry
    for file, entry in _table["files"].items()
}


@dataclass(frozen=True)
class Finding:
    """An entry beside its source. change: "", "changed" or "gone"; digest: of the source."""

    file: str
    name: str
    why: str
    change: str
    digest: str

    def __str__(self) -> str:
        return f"{self.change or 'same'} {self.file} {self.name or '(whole)'}: {self.why}"


@dataclass(frozen=True)
class Report:
    """One repository that is here. content: from `content_of`."""

    pin: Pin
    root: Path
    content: str
    findings: Sequence[Finding]

    @property
    def changed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.change]

    @property
    def at_pin(self) -> bool:
        return self.content == self.pin.content and not self.changed

    def __str__(self) -> str:
        version = str(self.pin)
        if not self.at_pin:
            version = f"another version (sha256:{self.content}), not {self.pin}"
        count = len(self.findings)
        return (
            f"{self.pin.title} in {self.root} is {version}; {count - len(self.changed)} of {count} "
            "things that the engine relies on are unchanged"
        )


def check(roots: Mapping[str, Path]) -> list[Report]:
    """Compare sources with contract.yaml. roots: keys of PINS -> the folder that holds the package;
    ConfigError if it does not.
    """
    reports = []
    for package, root in roots.items():
        if not (root / package).is_dir():
            raise ConfigError(
                f"{root} holds no folder {package}: give a checkout of {PINS[package].title}"
            )
        findings = []
        for file in ENTRIES:
            if file.split("/")[0].replace("cli", "mindspeed_rl") == package:
                findings += compare(root, file)
        reports.append(Report(PINS[package], root, content_of(root / package), findings))
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
        change = ""
        here = digest(nodes)
        if here != expected:
            change = "changed" if nodes else "gone"
        yield Finding(file, name, why, change, here)


def require(reports: Sequence[Report]) -> list[str]:
    """Warnings of versions that are not the pin, though all that we rely on is unchanged.
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
    return [str(report) for report in reports if not report.at_pin]


def installed() -> dict[str, Path]:
    """Keys of PINS -> the folder that holds the package that Python takes; imports nothing."""
    roots = {}
    for package in PINS:
        spec = importlib.util.find_spec(package)
        folders = list(spec.submodule_search_locations or []) if spec else []
        for folder in map(Path, folders):
            # Megatron has no __init__.py: any folder of its name would count as a part of it.
            if (folder / "__init__.py").is_file() or (folder / "core").is_dir():
                roots.setdefault(package, folder.resolve().parent)
    return roots


def content_of(folder: Path) -> str:
    """12 hex digits over names and bytes of the Python files below `folder`, except those an
    installation writes.
    """
    hashes = {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in folder.rglob("*.py")
        if path.name not in GENERATED
    }
    return _short_digest(repr(sorted(hashes.items())))


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
    statements = [statement for statement in scope.body if first in _names(statement)]
    return definitions(statements[-1], rest) if statements and rest else statements


def _names(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement defines; one below an if or try does not count."""
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
    return _short_digest("".join(map(repr, _canonical(statements))))


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, without positions, docstrings and what only some Python
    versions record.
    """
    match node:
        case ast.Expr(value=ast.Constant(value=str())):  # a docstring
            return None
        case list():
            return tuple(part for part in map(_canonical, node) if part is not None)
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty parts in it
            value = [part for part in value if getattr(part, "value", None) != ""]
        if name != "ctx" and value not in (None, []):
            fields.append((name, _canonical(value)))
    return type(node).__name__, tuple(fields)
