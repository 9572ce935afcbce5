"""The table of `npu-smi info`, read by its titles: they differ between drivers and cards."""

import re
from collections.abc import Iterator

from mindspeed_qerl.preflight.case import Die


def read_table(table: str) -> tuple[list[Die], dict[int, list[str]] | None]:
    """The NPUs in the output of `npu-smi info`, and the processes on each by the number of its die;
    None without a table of processes. An NPU has two lines, below two lines of titles:

        | NPU   Name                | Health        | Power(W)    Temp(C)    Hugepages-Usage(page)|
        | Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB) |
        | 0     Ascend910           | OK            | 178.5       36                0    / 0      |
        | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536  |

        | NPU     Chip   | Process id    | Process name    | Process memory(MB) |
        | 0       0      | 632268        | python3.1       | 197                |

    Processes of other containers are listed if all devices are mapped, with NA for what cannot be
    seen; 26.0 has one more column (vllm-ascend issue 12980).
    """
    titles: dict[str, list[str]] = {}
    dies: list[Die] = []
    held: dict[int, list[str]] | None = None
    above: dict[str, str] = {}
    for cells in _rows(table):
        first = cells[0].partition(" ")[0]
        if "Process id" in cells:
            titles["process"], held = cells, {}
        elif held is not None:
            _add_process(held, dies, _named(titles["process"], cells))
        elif first in ("NPU", "Chip"):
            titles[first] = cells
        elif len(titles) < 2 or not first.isdecimal():
            above = {}
        elif not above:
            above = _named(titles["NPU"], cells)
        else:
            dies += _die(above, _named(titles["Chip"], cells))
            above = {}
    return dies, held


def _die(above: dict[str, str], below: dict[str, str]) -> list[Die]:
    """The die of two lines, none if they have no numbers. The number of its /dev/davinci* is its
    Phy-ID (910C, two chips a card) or Device (310P), else that of the card (910B). Memory is that
    of HBM, else the other; 0 if neither is printed.
    """
    card, chip = above.get("NPU", ""), below.get("Chip", "")
    number = below.get("Phy-ID") or below.get("Device") or card
    if not (card.isdecimal() and chip.isdecimal() and number.isdecimal()):
        return []
    used = total = 0
    for title in ("Memory-Usage", "HBM-Usage"):
        if re.fullmatch(r"\d+/0*[1-9]\d*", below.get(title, "")):
            used, total = map(int, below[title].split("/"))
    return [Die(int(card), int(chip), int(number), above.get("Health", ""), used, total)]


def _add_process(held: dict[int, list[str]], dies: list[Die], row: dict[str, str]) -> None:
    for die in dies:
        if (str(die.card), str(die.chip)) == (row.get("NPU", ""), row.get("Chip", "0")):
            name = row.get("Process name") or "a process"
            pid, memory = row.get("Process id", "NA"), row.get("Process memory", "NA")
            held.setdefault(die.number, []).append(f"{name} (process {pid}, {memory} MB)")


def _rows(table: str) -> Iterator[list[str]]:
    """The cells of each line of a table, without a terminal's colours; [""] for a line between."""
    for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", table).splitlines():
        line = line.strip()
        if line.startswith("|"):
            cells = line.removeprefix("|").removesuffix("|").split("|")
            yield [cell.strip() for cell in cells]
        else:
            yield [""]


def _named(titles: list[str], cells: list[str]) -> dict[str, str]:
    """What stands below each title. A cell has several, and as many values, but for the title of a
    process, which is of several words; units are left out.

    >>> _named(["NPU   Name", "Temp(C)  Usage(page"], ["0     Ascend910", "36       0    / 15"])
    {'NPU': '0', 'Name': 'Ascend910', 'Temp': '36', 'Usage': '0/15'}
    """
    named: dict[str, str] = {}
    for title, cell in zip(titles, cells):
        title = re.sub(r"\s*\([^)]*\)?", "", title)
        names = [title] if title.startswith("Process") else title.split()
        values = re.sub(r"\s*/\s*", "/", cell).split() if len(names) > 1 else [cell]
        named |= zip(names, values)
    return named
