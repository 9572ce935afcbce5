"""Is this machine ready for this config? A table of checks, each passed, warning, failed, accepted
or skipped, with what to type.

    checks = preflight(raw, name, Machine())     # tools/preflight.py prints them

A check is a function (machine, case) -> checks. Nothing is started or written, and nothing imported
here that a run would need: no torch, no upstream; what could hang or crash (npu-smi, CANN, a Ray
that does not answer, a worker's imports) runs as a process with a time limit.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mindspeed_qerl.preflight.accepted import PLAIN, accept
from mindspeed_qerl.preflight.cann import cann
from mindspeed_qerl.preflight.case import (
    ACCEPTED,
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Check,
    case_of,
    plain,
)
from mindspeed_qerl.preflight.compiling import helpers, operators
from mindspeed_qerl.preflight.config import config, layout_rules, memory, model
from mindspeed_qerl.preflight.files import base_checkpoint, overlap, test_data, training_data
from mindspeed_qerl.preflight.host import (
    cpus,
    cpuset,
    disk,
    host_memory,
    jemalloc,
    open_files,
    panic_on_oom,
    ports,
    ray_disk,
    shared_memory,
    threads,
    user,
)
from mindspeed_qerl.preflight.imports import LIMIT, imports
from mindspeed_qerl.preflight.machine import Machine
from mindspeed_qerl.preflight.network import addresses, between_nodes, host_name
from mindspeed_qerl.preflight.npus import NO_NPU, npus, see_npus
from mindspeed_qerl.preflight.software import environment, sources, versions, vllm_ascend
from mindspeed_qerl.preflight.variables import variables

STYLES = {
    PASSED: "green",
    WARNING: "yellow",
    FAILED: "bold red",
    SKIPPED: "dim",
    ACCEPTED: "magenta",
}
GROUPS = {
    "NPUs": (npus,),
    "host": (
        cpus,
        cpuset,
        host_memory,
        open_files,
        threads,
        user,
        shared_memory,
        ray_disk,
        disk,
        ports,
        host_name,
        addresses,
        between_nodes,
        panic_on_oom,
        jemalloc,
        cann,
        helpers,
        operators,
    ),
    "environment": (environment, variables),
    "versions": (versions, sources, vllm_ascend, imports),
    "config": (config, layout_rules, memory),
    "model": (model,),
    "data": (training_data, test_data, overlap),
    "checkpoints": (base_checkpoint,),
}


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
            f"imports, if it is here, for at most {LIMIT} s ..."
        )
        case = replace(case, seen=see_npus(machine, own_ray))
    checks = []
    for group, functions in GROUPS.items():
        for function in functions:
            try:
                checks += [replace(check, group=group) for check in function(machine, case)]
            except Exception as error:  # noqa: BLE001  a missing package, an unreadable file: go on with the others
                checks.append(
                    Check(
                        function.__name__.replace("_", " "),
                        FAILED,
                        f"could not be checked: {type(error).__name__}: {error}",
                        group=group,
                    )
                )
    return accept(checks, case.recipe.run.accepted_checks)


def headline(checks: Iterable[Check]) -> str:
    """ "3 failed, 1 warning, 20 passed, 5 skipped"."""
    counts = Counter(check.state for check in checks)
    return ", ".join(
        f"{counts[state]} {state}"
        for state in (FAILED, ACCEPTED, WARNING, PASSED, SKIPPED)
        if counts[state]
    )


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
        fixes += [check] if check.fix else []
        number = f" [{len(fixes)}]" if check.fix else ""
        table.add_row(
            Text(f"  {check.name}"),
            Text(check.state + number, style=STYLES[check.state]),
            Text(check.found),
        )
    if any(
        check.name == "ranks" and check.state == FAILED and check.found.endswith(NO_NPU)
        for check in checks
    ):
        console.print(
            "No NPU here: a launch would stop at once. Everything else is checked.",
            style="bold",
            highlight=False,
        )
    console.print(table)
    for number, check in enumerate(fixes, 1):
        console.print(f"[bold]{escape(f'[{number}]')} {escape(check.name)}[/bold]", highlight=False)
        for line in check.fix.splitlines():
            console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
    if false := [
        plain(check.name)
        for check in checks
        if check.state == FAILED and plain(check.name) in PLAIN
    ]:
        console.print(
            f"\nIf a check is wrong about this machine: --accept NAME, of {', '.join(false)}; the "
            "run directory keeps it",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"\n{headline(checks)}", highlight=False)
