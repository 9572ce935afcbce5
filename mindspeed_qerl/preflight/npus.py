"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses
some. npu-smi, CANN and Ray are asked, each with a time limit.
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from mindspeed_qerl.ascend.cluster import holders
from mindspeed_qerl.layout.memory import estimate, settings_of

from .case import LIST, Case, Check, Die, Question, Seen, enough, failed, gigabytes, passed, warning
from .host import fault_of_ray_address
from .machine import LateError, Machine, ProbeError

# What a die that nobody uses shows, and some: of 64 GB public reports have 2.7 to 3.5 GB.
IDLE = 1 / 8
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# The two lines of an NPU in the table of npu-smi. The number of its /dev/davinci* is its Phy-ID
# (910C, two chips a card), else that of the card (910B); the last column is its HBM in MB:
#
#     | 0     Ascend910           | OK            | 178.5       36                0    / 0      |
#     | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536  |
DIE = re.compile(
    r"^\|\s*(?P<card>\d+)\s+\S[^|]*\|\s*(?P<health>\S[^|]*?)\s*\|[^|]*\|\s*\n"
    r"\|\s*\d+\s+(?P<number>\d*)\s*\|[^|]*:[^|]*\|"
    r"[^|]*?(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|",
    re.MULTILINE,
)
# Of a process whose list of visible devices is not cut: the list is compared by itself.
CANN_PROBE = """
import acl
count, error = acl.rt.get_device_count()
assert error == 0, f"acl.rt.get_device_count() gives error {error}"
print("answer", count)
"""
RAY_PROBE = """
import json, os, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.pop("RAY_ADDRESS", None)  # would go before the address that is given
import ray
from mindspeed_qerl.ascend.cluster import look
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("answer", json.dumps(look()))
"""


def see_npus(machine: Machine, own_ray: bool) -> Seen:
    """Ask each part of the machine; Ray unless one is started for the run."""
    answers: dict[str, Any] = {}
    faults: dict[str, ProbeError] = {}
    whole = {name: value for name, value in machine.environment.items() if name != LIST}
    asks: dict[str, Any] = {
        "npu-smi": _npu_smi,
        "CANN": partial(_answer, code=CANN_PROBE, environment=whole),
    }
    if not own_ray:
        asks["Ray"] = _cluster
    for name, ask in asks.items():
        try:
            answers[name] = ask(machine)
        except ProbeError as error:
            faults[name] = error
    nodes = machine.glob("/dev/davinci[0-9]*")
    shut = [node for node in (*nodes, *MANAGERS) if not machine.opens(node)]
    if nodes and shut:
        words = f"{len(nodes)} dies, and cannot open {', '.join(shut)}: missing, or not this user's"
        faults["/dev/davinci*"] = ProbeError(words)
    numbers = sorted(int(node.removeprefix("/dev/davinci")) for node in nodes)
    visible = None
    if LIST in machine.environment:
        given = machine.environment[LIST]
        visible = given.split(",") if given else []
    return Seen(
        answers.get("npu-smi", ()),
        numbers,
        answers.get("CANN", 0),
        visible,
        answers.get("Ray"),
        faults,
    )


def _npu_smi(machine: Machine) -> list[Die]:
    table = machine.run(["npu-smi", "info"])
    dies = read_table(table)
    if not dies:
        words = " ".join(table.split())[:200]
        raise ProbeError(f"npu-smi info shows no NPU, or in an unknown form: {words}")
    return dies


def read_table(table: str) -> list[Die]:
    """The NPUs in the output of `npu-smi info`."""
    dies = []
    for row in DIE.finditer(table):
        number = int(row["number"] or row["card"])
        dies.append(Die(number, row["health"], int(row["used"]), int(row["total"])))
    return dies


def _cluster(machine: Machine) -> Mapping[str, Any] | None:
    """Returns what the running Ray has (ascend/cluster.py); None if none runs."""
    address = machine.environment.get("RAY_ADDRESS") or "auto"
    if address == "local" or (address == "auto" and not machine.runs("raylet")):
        return None
    if address != "auto":
        fault = fault_of_ray_address(address)
        if not fault and not machine.listens(address):
            fault = "nothing listens there"
        if fault:
            raise ProbeError(f"RAY_ADDRESS={address} cannot be joined: {fault}")
    return _answer(machine, RAY_PROBE, address)


def _answer(
    machine: Machine, code: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Any:
    """Returns what Python code prints behind "answer", as JSON."""
    output = machine.run([sys.executable, "-c", code, *arguments], environment=environment)
    answer = re.search(r"^answer (.*)$", output, re.MULTILINE)
    if answer is None:
        raise ProbeError(f"not understood: {output.strip()[:80]!r}")
    return json.loads(answer[1])


# ---- what is checked ----


def ranks(case: Case) -> Check:
    """The number of each part, and the first of them that loses some."""
    if not case.npus_here:
        return failed(
            f"{case.npus} NPUs are asked for, this machine has none; all else is checked",
            f"Rehearse it here: python cli/train_grpo.py --config-name {case.name} engine=local "
            "rehearsal.enabled=true",
        )
    counts = case.seen.counts()
    numbers = ", ".join(f"{part} {count}" for part, count in counts.items())
    words = f"{case.ranks} asked for here; {numbers}"
    expected = case.ranks
    for part, count in counts.items():
        if count < expected and not case.accepts(part):
            return failed(f"{words}. Lost at {part}")
        expected = min(expected, count)
    return passed(words)


def count(case: Case, name: str) -> Check:
    """The dies that one part counts: failed where they are fewer than are needed, a warning where
    the parts above it have as few.
    """
    if name in case.seen.faults:
        return failed(str(case.seen.faults[name]))
    counts = case.seen.counts()
    parts = list(counts)
    above = [counts[part] for part in parts[: parts.index(name)]]
    return enough(counts[name], min([case.ranks, *above]), case.ranks, f"{counts[name]} dies")


def npu_smi(case: Case) -> Check:
    """Health of the dies that the run takes, and memory that somebody holds on them against the
    plan's.
    """
    seen = case.seen
    wanted = case.ranks
    fault = seen.faults.get("npu-smi")
    if fault:
        verdict = failed if isinstance(fault, LateError) else warning
        return verdict(f"{fault}; health and memory of the dies are not known")
    taken = seen.taken(wanted)
    words = f"{len(seen.dies)} dies"
    sick = [f"davinci{die.number}: {die.health}" for die in taken if die.sick]
    if sick:
        words += f"; of the first {wanted}, which the run uses, {'; '.join(sick)}"
    if sick or len(seen.dies) < wanted:
        return failed(words)
    busy = [die for die in taken if die.used > die.total * IDLE]
    if not busy:
        return passed(f"{words}; the first {wanted} that are mapped are healthy and free")
    held = [f"davinci{die.number} ({die.used:,} of {die.total:,} MB)" for die in busy]
    words += f"; in use: {'; '.join(held)}"
    if case.legal is None:
        return warning(words)
    left = 2**20 * min(die.total - die.used for die in busy)
    need = estimate(case.legal, settings_of(case.recipe)).peak
    words += f". The plan needs {gigabytes(need)} of the {gigabytes(left)} that are left"
    return enough(left, need, float("inf"), words)


def visible(case: Case) -> Check:
    """Dies by the list of the shell. A worker gives Ray's number straight to set_device
    (base_worker.py:89), so that only the first dies can be used, in their order.
    """
    entries = case.seen.visible
    first = [str(die) for die in range(case.ranks)]
    if entries is None:
        return passed("not set: all are visible")
    words = f"{len(entries)} entries: {','.join(entries)}"
    if entries[: case.ranks] == first:
        return passed(words)
    return failed(
        f"{words}; a worker gives Ray's number straight to set_device (base_worker.py:89)",
        f"unset {LIST}, or export {LIST}={','.join(first)}",
    )


def ray(case: Case) -> Check:
    seen = case.seen
    if seen.ray is None:
        return count(case, "Ray")
    total, free = (int(seen.ray[key].get("NPU", 0)) for key in ("resources", "available"))
    words = f"one is running with {total} NPUs on {seen.ray['nodes']} nodes"
    if free < total:
        words += f", of which {free} are free; the others are {holders(seen.ray)}"
    if free < case.npus:
        return failed(f"{words}: upstream would wait for {case.npus} for ever")
    return passed(words)


CHECKS = [
    Question("ranks", ranks, "See the part that loses some", refused=True),
    Question(
        "npu-smi",
        npu_smi,
        "npu-smi info    # here and on the host; processes are at its end: stop those that "
        'are yours and left over. "device is used" is another container\n'
        "ps -eo pid,stat,args | grep npu-smi    # no answer, in state D: it hangs inside the "
        "driver, as a run would; a reset or reboot by the host's owner\n"
        "Map /usr/local/bin/npu-smi, /usr/local/dcmi and /usr/local/Ascend/driver into the "
        "container; export "
        "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:$LD_LIBRARY_PATH\n"
        "A faulty or missing die is a case for the vendor; until then start the container "
        "with others (--device=/dev/davinciN), or ask for fewer NPUs",
        "npus_here",
    ),
    Question(
        "/dev/davinci*",
        partial(count, name="/dev/davinci*"),
        "Start the container with --device=/dev/davinciN of each die, "
        "--device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc,\n"
        "and as root with --cap-add DAC_OVERRIDE, or with --group-add and the group of the "
        "nodes (ls -ln /dev/davinci*)",
        "npus_here",
    ),
    Question(
        "CANN",
        partial(count, name="CANN"),
        "npu-smi info    # a die that is not OK, or that a process of another container has\n"
        "grep -rh ERROR ~/ascend/log/debug/plog | tail    # CANN's own words; "
        "ASCEND_PROCESS_LOG_PATH moves it\n"
        "No module named 'acl': export "
        "PYTHONPATH=$PYTHONPATH:$ASCEND_HOME_PATH/python/site-packages\n"
        "or ask for fewer NPUs: python tools/plan_layout.py --ranks N",
        "npus_here",
    ),
    Question("ASCEND_RT_VISIBLE_DEVICES", visible, needs="npus_here"),
    Question(
        "Ray",
        ray,
        "unset RAY_ADDRESS; ray stop    # it stops every Ray of this user; the run starts its "
        "own\n"
        "or ask for fewer NPUs: python tools/plan_layout.py --ranks N",
        "npus_here",
    ),
]
