"""What `npu-smi info` prints, in the form of public reports of 910C boxes (vllm-project/vllm-ascend
issues 2534, 5588) and of 910B boxes (issue 1130).
"""

from collections.abc import Mapping, Sequence

PLAIN, DOUBLE = ("+" + "+".join(line * width for width in (27, 15, 52)) + "+\n" for line in "-=")
WIDE = f"+{'-' * 96}+\n"


def table(
    kind: str,
    dies: Sequence[int],
    sick: Mapping[int, str],
    used: Mapping[int, int],
    version: str | None,
    memory: int = 65536,
) -> str:
    """Dies in the order of /dev/davinci*: two chips a card with their Phy-ID for a 910C, else one."""
    chips = 2 if kind == "910C" else 1
    version = version or "25.2.1"
    phy = "  Phy-ID" if chips == 2 else ""
    text = WIDE + f"| npu-smi {version:<25}Version: {version:<53}|\n" + PLAIN
    text += _row("NPU   Name", "Health", "Power(W)    Temp(C)           Hugepages-Usage(page)")
    text += _row(f"Chip{phy}", "Bus-Id", "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)") + DOUBLE
    for die in dies:
        card, chip = divmod(die, chips)
        name, watts = ("Ascend910", "178.5") if chips == 2 else (kind, "96.4")
        held = used.get(die, 3416 - 221 * chip)
        text += _row(
            f"{card:<6}{name}", sick.get(die, "OK"), f"{'-' if chip else watts:<12}{36:<18}0    / 0"
        )
        text += _row(
            f"{chip:<6}" + (str(die) if chips == 2 else ""),
            f"0000:{0x9D + die:02X}:00.0",
            f"{0:<12}0    / 0          {held:<5}/ {memory}",
        )
        text += DOUBLE if chip == chips - 1 else WIDE
    text += (
        PLAIN
        + _processes("NPU     Chip", "Process id", "Process name", "Process memory(MB)")
        + DOUBLE
    )
    for card in sorted({die // chips for die in dies}):
        holds = [die for die in dies if die // chips == card and die in used]
        for die in holds:
            text += _processes(
                f"{card:<8}{die % chips}", str(632268 + die), "python3.11", str(used[die] - 3000)
            )
        text += ("" if holds else f"| No running processes found in NPU {card:<61}|\n") + DOUBLE
    return text


def _row(first: str, second: str, third: str) -> str:
    return f"| {first:<26}| {second:<14}| {third:<51}|\n"


def _processes(*cells: str) -> str:
    return (
        "|" + "|".join(f" {cell:<{width}}" for cell, width in zip(cells, (26, 14, 25, 25))) + "|\n"
    )
