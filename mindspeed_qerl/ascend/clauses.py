"""Promises about source code, read with ast and never imported: what kinds there are, and how one is held against a file.

A clause names a file (relative to the root of its repository), a qualified name in it ("Class.method", "function.local") and the
reason we need it. Nothing here knows MindSpeed-RL: the promises themselves are in contract.py.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOLDS, BROKEN, NOT_CHECKED = "holds", "broken", "not checked"

# Fields that differ between Python versions, or that do not change what the code does.
_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_params"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Broken(Exception):
    """A clause does not hold: what was found instead, and the line it was found at (None if there is no line to name)."""

    def __init__(self, found: str, line: int | None = None):
        super().__init__(found)
        self.found, self.line = found, line


@dataclass(frozen=True)
class Clause:
    """One promise. `look` returns the line that keeps it, or raises Broken."""

    file: str
    name: str
    why: str

    def look(self, module: ast.Module) -> int:
        raise NotImplementedError

    @property
    def promise(self) -> str:
        """What is promised, in one line."""
        raise NotImplementedError


@dataclass(frozen=True)
class Finding:
    """What became of one clause. line: where it holds or breaks. found: what is there instead, or why nothing was read."""

    clause: Clause
    status: str
    line: int | None = None
    found: str = ""

    @property
    def where(self) -> str:
        return self.clause.file if self.line is None else f"{self.clause.file}:{self.line}"


@dataclass(frozen=True)
class Function(Clause):
    """A function or method, with a decorator if we rely on it.

    called: a call of ours, whose arguments must bind to its parameters.
    signature: for one that we replace, so that others call ours: its parameters with defaults, without annotations.
    """

    called: str | None = field(default=None, kw_only=True)
    signature: str | None = field(default=None, kw_only=True)
    decorator: str | None = field(default=None, kw_only=True)

    def look(self, module: ast.Module) -> int:
        function = find(module, self.name, (ast.FunctionDef, ast.AsyncFunctionDef))
        _look_for_decorator(function, self.decorator)
        parameters = _parameters(function)
        if self.signature is not None:
            promised = _parameters(ast.parse(f"def f({self.signature}): pass").body[0])
            if parameters != promised:
                raise Broken(f"its parameters are {inspect.Signature(parameters)}", function.lineno)
        if self.called is not None:
            is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
            if "." in self.name and not is_static:
                parameters = parameters[1:]  # self or cls
            call = ast.parse(self.called, mode="eval").body
            keywords = {keyword.arg: None for keyword in call.keywords}
            try:
                inspect.Signature(parameters).bind(*call.args, **keywords)
            except TypeError as error:
                raise Broken(f"{error}; its parameters are {inspect.Signature(parameters)}", function.lineno) from None
        return function.lineno

    @property
    def promise(self) -> str:
        decorator = f", @{self.decorator}" if self.decorator else ""
        return (self.called or f"def {self.name}({self.signature or '...'})") + decorator


@dataclass(frozen=True)
class Class(Clause):
    """A class, with these bases in this order and this decorator."""

    bases: tuple[str, ...] = field(default=(), kw_only=True)
    decorator: str | None = field(default=None, kw_only=True)

    def look(self, module: ast.Module) -> int:
        found = find(module, self.name, ast.ClassDef)
        _look_for_decorator(found, self.decorator)
        bases = tuple(ast.unparse(base) for base in found.bases)
        if bases != self.bases:
            raise Broken(f"its bases are ({', '.join(bases)})", found.lineno)
        return found.lineno

    @property
    def promise(self) -> str:
        return f"class {self.name}({', '.join(self.bases)})" + (f", @{self.decorator}" if self.decorator else "")


@dataclass(frozen=True)
class Attributes(Clause):
    """Attributes that __init__ of a class sets on self, others apart."""

    names: frozenset[str] = field(kw_only=True)

    def look(self, module: ast.Module) -> int:
        init = find(module, f"{self.name}.__init__", ast.FunctionDef)
        stored = {node.attr for node in ast.walk(init) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                  and isinstance(node.value, ast.Name) and node.value.id == "self"}
        missing = sorted(self.names - stored)
        if missing:
            raise Broken(f"it does not set {', '.join(missing)}", init.lineno)
        return init.lineno

    @property
    def promise(self) -> str:
        return f"{self.name} sets {_short(sorted(self.names))}"


@dataclass(frozen=True)
class Dictionary(Clause):
    """A dictionary display: a variable ("REGISTRY", "function.local") or what a function returns ("function.return").

    entries: key -> source of its value, or None for any value. A key is a string's value, or the source of another expression.
    absent: keys that must not be there. exactly: no other keys than those of entries.
    """

    entries: Mapping[str, str | None] = field(kw_only=True)
    absent: frozenset[str] = field(default=frozenset(), kw_only=True)
    exactly: bool = field(default=False, kw_only=True)

    def look(self, module: ast.Module) -> int:
        owner, _, variable = self.name.rpartition(".")
        display = _dictionary(find(module, owner), variable)
        there = {key.value if isinstance(key, ast.Constant) else ast.unparse(key): value
                 for key, value in zip(display.keys, display.values) if key is not None}
        for what, keys in (("is missing", [key for key in self.entries if key not in there]),
                           ("is new", [key for key in there if self.exactly and key not in self.entries])):
            if keys:
                raise Broken(f"{', '.join(map(repr, keys))} {what}", display.lineno)
        for key, value in self.entries.items():
            if value is not None and not _same(there[key], ast.parse(value, mode="eval").body):
                raise Broken(f"{key!r} is {_cut(ast.unparse(there[key]))}, not {value}", there[key].lineno)
        for key in sorted(self.absent & set(there)):
            raise Broken(f"{key!r} is there already: {_cut(ast.unparse(there[key]))}", there[key].lineno)
        return display.lineno

    @property
    def promise(self) -> str:
        absent = f", not {_short(sorted(self.absent))}" if self.absent else ""
        return f"{self.name} has {'exactly ' if self.exactly else ''}{_short(list(self.entries))}{absent}"


@dataclass(frozen=True)
class Globals(Clause):
    """Names that a function looks up in its module when it is called, so that replacing the module's name is enough."""

    names: tuple[str, ...] = field(kw_only=True)

    def look(self, module: ast.Module) -> int:
        function = find(module, self.name, (ast.FunctionDef, ast.AsyncFunctionDef))
        of_module, of_function = dict(_bindings(module)), dict(_bindings(function))
        # The body only: annotations, defaults and decorators are looked up when the function is defined.
        read = {node.id for statement in function.body for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        for name in self.names:
            if name in of_function:
                raise Broken(f"{name} is bound inside the function", of_function[name])
            if name not in of_module:
                raise Broken(f"{name} is not a name of the module", function.lineno)
            if name not in read:
                raise Broken(f"{name} is not used in the function", function.lineno)
        return function.lineno

    @property
    def promise(self) -> str:
        return f"{self.name} looks up {', '.join(self.names)} in its module"


@dataclass(frozen=True)
class Source(Clause):
    """Behaviour: expressions or statements that occur in a function (in the module if `name` is empty), in this order.

    Compared as syntax trees, so neither layout nor quotes matter. An expression may occur anywhere, also inside another.
    """

    snippets: tuple[str, ...] = field(kw_only=True)

    def look(self, module: ast.Module) -> int:
        owner = find(module, self.name)
        first, after, previous = None, (0, -1), ""
        for snippet in self.snippets:
            wanted = _snippet(snippet)
            nodes = sorted((node for node in ast.walk(owner) if isinstance(node, type(wanted)) and hasattr(node, "lineno")),
                           key=_position)
            matches = [node for node in nodes if _same(node, wanted)]
            match = next((node for node in matches if _position(node) > after), None)
            if match is None and matches:
                raise Broken(f"`{_cut(snippet)}` comes before `{_cut(previous)}`", matches[-1].lineno)
            if match is None:
                raise _no_such_source(owner, snippet, nodes)
            first, after, previous = first or match.lineno, _position(match), snippet
        return first

    @property
    def promise(self) -> str:
        more = f" and {len(self.snippets) - 1} more, in this order" if len(self.snippets) > 1 else ""
        return f"{self.name or 'the module'}: `{_cut(self.snippets[0], 70)}`{more}"


@dataclass(frozen=True)
class Without(Clause):
    """A function does not mention a word: no name, attribute, argument or string holds it."""

    word: str = field(kw_only=True)

    def look(self, module: ast.Module) -> int:
        owner = find(module, self.name)
        for node in ast.walk(owner):
            texts = [text for _, text in ast.iter_fields(node) if isinstance(text, str)]
            if any(self.word in text for text in texts):
                raise Broken(f"it mentions {self.word}", getattr(node, "lineno", owner.lineno))
        return owner.lineno

    @property
    def promise(self) -> str:
        return f"{self.name} does not mention {self.word}"


@dataclass(frozen=True)
class Unchanged(Clause):
    """A function that we wrote again, or whose every line we lean on: the digest of its syntax tree (see `digest`)."""

    digest: str = field(kw_only=True)

    def look(self, module: ast.Module) -> int:
        function = find(module, self.name, (ast.FunctionDef, ast.AsyncFunctionDef))
        if digest(function) != self.digest:
            raise Broken(f"its code changed: digest {digest(function)}, not {self.digest}", function.lineno)
        return function.lineno

    @property
    def promise(self) -> str:
        return f"{self.name} is unchanged ({self.digest})"


def examine(clause: Clause, root: Path) -> Finding:
    """Hold one clause against the sources below `root`."""
    path = root / clause.file
    try:
        if not path.is_file():
            raise Broken("there is no such file")
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            raise Broken(f"it cannot be parsed: {error}", getattr(error, "lineno", None)) from None
        return Finding(clause, HOLDS, clause.look(module))
    except Broken as broken:
        return Finding(clause, BROKEN, broken.line, broken.found)


def digest(function: ast.AST) -> str:
    """12 hex digits over the syntax tree without docstrings, comments and layout; the same on every Python from 3.10."""
    return hashlib.sha256(repr(_canonical(function)).encode()).hexdigest()[:12]


def find(module: ast.Module, name: str, kind: type | tuple = ast.AST) -> ast.AST:
    """The definition with a qualified name, also below a top-level if or try; the last one if there are several, as at run time.

    Raises Broken with the nearest name that is there.
    """
    node, so_far = module, "the module"
    for part in name.split(".") if name else []:
        inner = {child.name: child for child in _statements(node) if isinstance(child, _SCOPES)}
        if part not in inner:
            near = difflib.get_close_matches(part, inner, n=1)
            raise Broken(f"{so_far} has no {part}" + (f"; the nearest name is {near[0]}" if near else ""),
                         getattr(node, "lineno", None))
        node, so_far = inner[part], part
    if not isinstance(node, kind):
        raise Broken(f"{name} is a {type(node).__name__}", node.lineno)
    return node


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a body, and of the if, try, with and loop blocks in it, but not those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler)):
            yield child
            if not isinstance(child, _SCOPES):
                yield from _statements(child)


def _bindings(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) for all that a module or function binds: arguments, imports, definitions, assignments."""
    if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from ((parameter.name, scope.lineno) for parameter in _parameters(scope))
    for statement in _statements(scope):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (((alias.asname or alias.name).split(".")[0], statement.lineno) for alias in statement.names)
        elif isinstance(statement, _SCOPES):
            yield statement.name, statement.lineno
        else:
            yield from ((node.id, node.lineno) for node in ast.walk(statement)
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _parameters(function: ast.FunctionDef) -> list[inspect.Parameter]:
    """The parameters as inspect knows them, each default as its source, without annotations."""
    arguments, Parameter = function.args, inspect.Parameter
    positional = [(argument.arg, Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs]
    positional += [(argument.arg, Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [(name, kind, default) for (name, kind), default in zip(positional, defaults)]
    if arguments.vararg:
        rows.append((arguments.vararg.arg, Parameter.VAR_POSITIONAL, None))
    rows += [(argument.arg, Parameter.KEYWORD_ONLY, default)
             for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        rows.append((arguments.kwarg.arg, Parameter.VAR_KEYWORD, None))
    return [Parameter(name, kind, default=Parameter.empty if default is None else _Text(ast.unparse(default)))
            for name, kind, default in rows]


class _Text(str):
    """Source text that shows itself without quotes."""

    __repr__ = str.__str__


def _look_for_decorator(definition: ast.AST, decorator: str | None) -> None:
    decorators = [ast.unparse(each) for each in definition.decorator_list]
    if decorator is not None and ast.unparse(ast.parse(decorator)) not in decorators:
        there = ", ".join(f"@{each}" for each in decorators) or "none"
        raise Broken(f"it is not decorated with @{decorator}; its decorators: {there}", definition.lineno)


def _dictionary(owner: ast.AST, variable: str) -> ast.Dict:
    for statement in reversed(list(_statements(owner))):
        if variable == "return":
            targets = ["return"] if isinstance(statement, ast.Return) else []
        else:
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            targets = [target.id for target in targets if isinstance(target, ast.Name)]
        if variable in targets:
            if not isinstance(statement.value, ast.Dict):
                raise Broken(f"{variable} is no dictionary display: {_cut(ast.unparse(statement.value))}", statement.lineno)
            return statement.value
    raise Broken(f"there is no dictionary {variable}", getattr(owner, "lineno", None))


def _snippet(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _no_such_source(owner: ast.AST, snippet: str, nodes: list[ast.AST]) -> Broken:
    sources = {ast.unparse(node): node for node in nodes}
    near = difflib.get_close_matches(snippet, sources, n=1, cutoff=0.7)
    if near:
        return Broken(f"`{_cut(snippet)}` does not occur; the nearest is `{_cut(near[0])}`", sources[near[0]].lineno)
    return Broken(f"`{_cut(snippet)}` does not occur", getattr(owner, "lineno", None))


def _position(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _same(a: ast.AST, b: ast.AST) -> bool:
    return _canonical(a) == _canonical(b)


def _canonical(node):
    """A syntax tree as nested tuples, without positions, docstrings and what only some Python versions record."""
    if isinstance(node, list):
        return tuple(_canonical(each) for each in node)
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS and value not in (None, [])}
    if isinstance(node, (*_SCOPES, ast.Module)) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    return type(node).__name__, tuple((name, _canonical(value)) for name, value in fields.items())


def _cut(text: str, length: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length - 3] + "..."


def _short(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:6])}, ... ({len(names)} in all)"
