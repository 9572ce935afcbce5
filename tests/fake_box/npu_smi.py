"""What `npu-smi info` prints, in the form of public reports of 910C boxes (vllm-project/vllm-ascend
issues 2534, 5588) and of 910B boxes (issue 1130).
"""

LINE = f"+{'-' * 96}+\n"
HEAD = f"""\
{LINE}| npu-smi 25.2.1                   Version: 25.2.1                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
"""


def table(kind, dies, sick, used, memory=65536):
    """Dies in the order of /dev/davinci*: two chips a card with their Phy-ID for a 910C, else
    one.
    """
    chips = 2 if kind == "910C" else 1
    name = "Ascend910" if chips == 2 else kind
    text = HEAD
    for die in dies:
        card, chip = divmod(die, chips)
        number = die if chips == 2 else ""
        health = f"{sick.get(die, 'OK'):<14}"
        text += f"| {card:<6}{name:<20}| {health}| 178.5       36                0    / 0             |\n"
        text += (
            f"| {chip:<6}{number:<20}| 0000:{0x9D + die:02X}:00.0  | 0           0    / 0          "
        )
        text += f"{used.get(die, 3416):<5}/ {memory}         |\n{LINE}"
    return text
