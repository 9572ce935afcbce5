"""Is this machine ready for this config? A table of checks, each passed, warning, failed, accepted
or skipped, with what to type.

    checks = preflight(raw, name, Machine())     # tools/preflight.py prints them

Nothing is started or written, and nothing imported here that a run would need: no torch, no
upstream; what could hang or crash (npu-smi, CANN, a Ray that does not answer, a worker's imports)
runs as a process with a time limit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mindspeed_qerl.common.errors import unknown
from mindspeed_qerl.preflight.asking import see_npus
from mindspeed_qerl.preflight.case import (
    ACCEPTED,
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    case_of,
    failed,
    passed,
    plain,
)
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.preflight.table import TABLE, Row

STYLES = {
    FAILED: "bold red",
    ACCEPTED: "magenta",
    WARNING: "yellow",
    PASSED: "green",
    SKIPPED: "dim",
}
GROUPS = tuple(dict.fromkeys(row.group for row in TABLE))
# Checks that may fail (run.accepted_checks): not what the engine refuses by itself.
ACCEPTABLE = [plain(row.name) for row in TABLE if not row.refused]


def preflight(
    raw: Mapping[str, Any],
    name: str,
    machine: Machine,
    nodes: int = 1,
    own_ray: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """Every check of the resolved config `name`, in the order of the table. A check that breaks is
    a failed line, never an error. `say` is told what may take long, before it does.
    """
    case = case_of(raw, name, nodes, own_ray)
    if case.on_npus:
        say(
            "asking npu-smi, CANN and Ray at once, for at most 20 s; then importing what a worker "
            "imports, if it is here, for at most 120 s ..."
        )
        case = replace(case, seen=see_npus(machine, own_ray))
    checks = [check for row in TABLE for check in _answers(row, machine, case)]
    return _accept(checks, case.recipe.run.accepted_checks)


def _answers(row: Row, machine: Machine, case: Case) -> Iterator[Check]:
    """The lines of a row."""
    if row.needs and not getattr(case, row.needs):
        return
    try:
        answer = row.verdict(machine, case)
        answers = [answer] if isinstance(answer, Check) else list(answer or ())
    except Exception as error:  # noqa: BLE001  a missing package, an unreadable file: go on
        answers = [failed(f"could not be checked: {type(error).__name__}: {error}")]
    for check in answers:
        fix = check.fix
        if check.state in (FAILED, WARNING):
            fix = fix or row.fix
        yield replace(check, name=check.name or row.name, group=row.group, fix=fix)


def _accept(checks: list[Check], names: Iterable[str]) -> list[Check]:
    """The checks with those that failed and are named `accepted`, and a line for names that are
    none or not needed.
    """
    names = list(dict.fromkeys(map(plain, names)))
    failures = {plain(check.name) for check in checks if check.state == FAILED}
    for number, check in enumerate(checks):
        name = plain(check.name)
        if check.state == FAILED and name in names and name in ACCEPTABLE:
            checks[number] = replace(check, state=ACCEPTED)
    for name in names:
        if name not in ACCEPTABLE:
            why = unknown("check", name, ACCEPTABLE)
            if name in failures:
                why = f"{name} cannot be accepted: the engine refuses it too, or other checks fail"
            fix = f"Take {name} out of --accept and run.accepted_checks"
            checks.append(failed(why, fix, "run.accepted_checks", "accepted"))
        elif name not in failures:
            words = f"{name}: accepted, and has not failed"
            checks.append(passed(words, name="not needed", group="accepted"))
    return checks


def headline(checks: Iterable[Check]) -> str:
    """ "3 failed, 1 warning, 20 passed, 5 skipped"."""
    counts = Counter(check.state for check in checks)
    return ", ".join(f"{counts[state]} {state}" for state in STYLES if counts[state])


def print_table(checks: list[Check], title: str, console: Console) -> None:
    """The table by group, and below it what to type, by the numbers in the table; commands are not
    broken into lines.
    """
    table = Table(title=title, title_justify="left", expand=True)
    table.add_column("check", width=27)
    table.add_column("state", width=12)
    table.add_column("found", ratio=1, overflow="fold")
    fixes, group = [], None
    for check in checks:
        if check.group != group:
            group = check.group
            table.add_section()
            table.add_row(Text(group, style="bold"), "", "")
        number = ""
        if check.fix:
            fixes.append(check)
            number = f" [{len(fixes)}]"
        state = Text(check.state + number, style=STYLES[check.state])
        table.add_row(Text(f"  {check.name}"), state, Text(check.found))
    console.print(table)
    for place, check in enumerate(fixes, 1):
        console.print(f"[bold]{escape(f'[{place}]')} {escape(check.name)}[/bold]", highlight=False)
        for line in check.fix.splitlines():
            console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
    names = [plain(check.name) for check in checks if check.state == FAILED]
    names = [name for name in names if name in ACCEPTABLE]
    if names:
        console.print(
            f"\nIf a check is wrong about this machine: --accept NAME, of {', '.join(names)}; the "
            "run directory keeps it",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"\n{headline(checks)}", highlight=False)
