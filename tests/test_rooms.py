"""The imports of the package against the table of rooms in docs/architecture.md, and the paths that
page names.
"""

import ast
import re
import sys

import pytest

from tests import ROOT

PACKAGE = ROOT / "mindspeed_qerl"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
DOORS = ("engines/", "common/")  # they name modules in strings, to import them when asked for
OUTSIDE = ("cli/", "tools/", "examples/", "benchmarks/")
# room -> its level, counted from the top, and the packages of others that it imports
TABLE = {
    room: (int(level), set(re.findall(r"`(\w+)`", packages)))
    for level, room, packages in re.findall(
        r"^\| (\d+) \| `([\w/.]+)` \|.*\|([^|]*)\|$", PAGE, re.MULTILINE
    )
}


def files(room):
    """The modules of a room; emulation's stand-ins are packages of other names."""
    place = (ROOT if room in OUTSIDE else PACKAGE) / room
    found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return [file for file in found if "stand_ins" not in file.parts]


def imported(room):
    """Names of modules that a room imports, at the top of a file, in a function, or, except in a
    door, by name.
    """
    names = set()
    for file in files(room):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level < 2, f"{file}: a relative import that may leave the room"
                if not node.level:
                    names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif (
                isinstance(node, ast.Constant)
                and room not in DOORS
                and re.fullmatch(r"mindspeed_qerl(\.\w+)+", str(node.value))
            ):
                names.add(node.value)
    return names


def rooms_used(room):
    """The other rooms that a room imports from."""
    heads = {name.split(".")[1] for name in imported(room) if name.startswith("mindspeed_qerl.")}
    return {
        f"{head}/" if (PACKAGE / head).is_dir() else f"{head}.py"
        for head in heads - {"__version__"}
    } - {room}


def test_the_table_names_every_room():
    inside = {
        f"{place.name}/" if place.is_dir() else place.name
        for place in PACKAGE.iterdir()
        if (place.suffix == ".py" and place.name != "__init__.py") or any(place.glob("*.py"))
    }
    assert TABLE.keys() == inside | set(OUTSIDE)


@pytest.mark.parametrize("room", TABLE)
def test_a_room_uses_only_rooms_below_it(room):
    wrong = {used for used in rooms_used(room) if TABLE[used][0] <= TABLE[room][0]}
    assert not wrong, (
        f"{room} imports {', '.join(sorted(wrong))}, which the table has beside or above it"
    )


@pytest.mark.parametrize("room", sorted(TABLE.keys() - set(OUTSIDE)))
def test_a_room_imports_the_packages_that_the_table_names(room):
    heads = (
        {name.split(".")[0] for name in imported(room)}
        - sys.stdlib_module_names
        - {"mindspeed_qerl"}
    )
    assert heads == TABLE[room][1]


def test_of_the_emulated_npu_the_local_engine_takes_one_module():
    emulated = {name for name in imported("local/") if name.startswith("mindspeed_qerl.emulation")}
    assert {".".join(name.split(".")[:3]) for name in emulated} == {
        "mindspeed_qerl.emulation.cuda_on_cpu",
        "mindspeed_qerl.emulation",
    }  # the latter by local/evaluate.py alone
    users = [file.name for file in files("local/") if "import emulation" in file.read_text()]
    assert users == ["evaluate.py"]


def test_every_path_that_the_page_names_is_there():
    named = set(re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|\.yaml|\.md|/))(?::\d+)?`", PAGE))
    missing = {
        path for path in named if not any((root / path).exists() for root in (ROOT, PACKAGE))
    }
    assert len(named) > 30 and not missing, missing


def test_every_path_that_the_code_names_is_there():
    """Pages, tests and our own modules, in docstrings, comments and messages; not upstream's."""
    ours = r"(?:docs|benchmarks|tests/\w+|algorithm|compare|local|recipe|rehearsal|runs|tasks(?:/gsm8k)?)"
    named = re.compile(rf"(?<![\w/.-]){ours}/\w+\.(?:py|md)\b")
    missing = set()
    for file in PACKAGE.rglob("*.py"):
        for path in named.findall(file.read_text()):
            if not any((root / path).exists() for root in (ROOT, PACKAGE)):
                missing.add(f"{file.relative_to(PACKAGE)}: {path}")
    assert not missing
