"""Do today's default tests see as many faults as those of an earlier commit? A sample of mutants of
today's code.

    python tests/mutation_sample.py --before 2977db8 --count 30     # an hour on 2 cores

A mutant is one operator, comparison, number or truth value of mindspeed_qerl/ changed, in a line
that both commits have once, in whichever file. Each is put into a copy of both commits, where the
default tests that import its module are run (all of its folder's when none does) until one fails
that does not without it. On a busy machine others fail, too: leave it alone.
Printed are the mutants that one of the two, or neither, sees: the latter are often no faults
(another number of decimals, a time-out), or are seen by tests that run the whole program.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SWAPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.And: "or",
    ast.Or: "and",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
UPSTREAM = ("upstream", "emulation")  # folders whose tests need its checkouts
LONGEST = 600  # seconds of one mutant's tests; a mutant that makes them wait is seen


@dataclass(frozen=True)
class Mutant:
    line: str
    mutated: str

    def is_seen(self, path, root, tests):
        """Whether one of `tests` fails with it in the file `path`, and does not without it."""
        source = path.read_text()
        left_out = []
        while True:
            path.write_text(source.replace(self.line, self.mutated, 1))
            failed = first_failure(root, tests, left_out)
            path.write_text(source)
            if failed is None:
                return False
            # of `tests`: cannot be imported, or never ends
            if failed in tests or first_failure(root, [failed]) is None:
                return True
            left_out.append(failed)  # it fails without the mutant, too


def tests_of(path, root):
    """Test files that import the module `path`, or a file of tests that does."""
    name = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
    package, module = map(re.escape, name.rsplit(".", 1))
    imports = [rf"from {package}\.{module} import|from {package} import .*\b{module}\b"]
    tests = {file: file.read_text() for file in sorted(root.glob("tests/**/*.py"))}
    found: list[Path] = []
    while imports:
        pattern = re.compile("|".join(imports))
        new = [file for file, text in tests.items() if file not in found and pattern.search(text)]
        found += new
        helpers = [re.escape(file.stem) for file in new if file.stem != "conftest"]
        imports = [rf"from [\w.]*\b{helper} import" for helper in helpers]
    files = [
        file
        for file in found
        if file.name.startswith("test_") and file.parent.name not in (*UPSTREAM, "real")
    ]
    folder = root / "tests" / path.parent.name
    if not files:
        files = [folder if folder.is_dir() else root / "tests"]
    files.sort(key=lambda file: file.parent != folder)  # those of its own room first
    return [str(file.relative_to(root)) for file in files]


def lines_of(root):
    """Lines that the package has once -> their file."""
    places: dict[str, list[Path]] = {}
    for path in sorted(root.glob("mindspeed_qerl/**/*.py")):
        if path.parent.name not in UPSTREAM:
            for line in path.read_text().splitlines():
                places.setdefault(line, []).append(path)
    return {line: files[0] for line, files in places.items() if len(files) == 1}


def changes(node, source):
    """A part of one line's code, and what is put in its place."""

    def text(part):
        return ast.get_source_segment(source, part)

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"{text(node.left)} {SWAPPED[type(node.ops[0])]} {text(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield node, f"{text(node.left)} {SWAPPED[type(node.op)]} {text(node.right)}"
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        yield node, f"{text(node.values[0])} {SWAPPED[type(node.op)]} {text(node.values[1])}"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, text(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        yield node, str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)


def mutants(path, common):
    """Those of a file in lines that are among `common`."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for part, replacement in changes(node, source):
            line = lines[part.lineno - 1]
            if part.lineno == part.end_lineno and line in common and line.isascii():
                mutated = line[: part.col_offset] + replacement + line[part.end_col_offset :]
                yield Mutant(f"{line}\n", f"{mutated}\n")


def copy_of(commit, folder):
    """A commit's files, with this checkout's environment and models."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    for name in (".venv", "models", "data"):
        if (ROOT / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


def first_failure(root, tests, left_out=()):
    """The first test that fails, or the first of `tests` if they never end or cannot be imported;
    None: none does.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}"]
        command += [f"--deselect={test}" for test in left_out]
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
                check=False,
                capture_output=True,
                timeout=LONGEST,
            )
        except subprocess.TimeoutExpired:
            return tests[0]
        if done.returncode in (0, 5):  # 5: all are left out
            return None
        lasts = Path(cache) / "v" / "cache" / "lastfailed"
        return next(iter(json.loads(lasts.read_text()))) if lasts.exists() else tests[0]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
        copies = {
            name: copy_of(commit, Path(temporary) / name)
            for name, commit in (("before", arguments.before), ("now", "HEAD"))
        }
        places = {name: lines_of(root) for name, root in copies.items()}
        common = places["before"].keys() & places["now"].keys()
        possible = set()
        for path in {places["now"][line] for line in common}:
            possible.update(mutants(path, common))
        ordered = sorted(possible, key=repr)
        sample = random.Random(arguments.seed).sample(ordered, arguments.count)
        print(f"{len(sample)} of {len(possible):,} mutants", flush=True)

        def seen(name):
            """Of each mutant."""
            root, results = copies[name], []
            for number, mutant in enumerate(sample, 1):
                path = places[name][mutant.line.rstrip("\n")]
                tests = tests_of(path, root)
                results.append(mutant.is_seen(path, root, tests))
                file = path.relative_to(root)
                print(
                    f"{name} {number}: {results[-1]} {file}: {mutant.mutated.strip()}", flush=True
                )
            return results

        with ThreadPoolExecutor() as pool:
            before, now = pool.map(seen, copies)
    print("\n(seen before, seen now):", dict(Counter(zip(before, now))))
    for mutant, *both in zip(sample, before, now):
        if both != [True, True]:
            print(f"before {both[0]}, now {both[1]}:")
            print(f"  - {mutant.line.strip()}\n  + {mutant.mutated.strip()}")


if __name__ == "__main__":
    main()
