"""The table of checks.yaml: every check of the preflight, a row each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import yaml

from mindspeed_qerl.preflight.case import Case, Check

FILE = Path(__file__).with_name("checks.yaml")


@dataclass(frozen=True)
class Row:
    """One check: its place in the table, and what checks.yaml says of it. `verdict` answers for a
    case with one line, several, or None where there is nothing to say.
    """

    group: str
    name: str
    ask: str
    verdict: Callable[[Case], Check | Iterable[Check] | None]
    fix: str
    needs: str = ""
    refused: bool = False


def read_table() -> tuple[Row, ...]:
    groups = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    kinds = groups.pop("kinds")
    rows = []
    for group, checks in groups.items():
        for name, own in checks.items():
            row = {"fix": ""} | kinds.get(group, {}) | own
            module, function = row["verdict"].split(".")
            row["verdict"] = getattr(import_module(f"{__package__}.{module}"), function)
            values = {"name": name}
            if "values" in row:
                values |= row.pop("values")
                row["verdict"] = partial(row["verdict"], **values)
            for words in ("ask", "fix"):
                row[words] = row[words].format(**values)
            rows.append(Row(group, name, **row))
    return tuple(rows)


TABLE = read_table()
