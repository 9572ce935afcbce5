"""Asks npu-smi, /dev, CANN and Ray how many NPUs they see, each with a time limit."""

import json
import re
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mindspeed_qerl.preflight.case import LIST, Die, Seen
from mindspeed_qerl.preflight.machine import Machine, ProbeError
from mindspeed_qerl.preflight.network import fault_of_ray_address

MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# The two lines of an NPU in the table of npu-smi. The number of its /dev/davinci* is its Phy-ID
# (910C, two chips a card), else that of the card (910B); the last column is its HBM in MB:
#
#     | 0     Ascend910           | OK            | 178.5       36                0    / 0      |
#     | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536  |
DIE = re.compile(
    r"^\|\s*(?P<card>\d+)\s+\S[^|]*\|\s*(?P<health>\S[^|]*?)\s*\|[^|]*\|\s*\n"
    r"\|\s*(?P<chip>\d+)\s+(?P<number>\d*)\s*\|[^|]*:[^|]*\|"
    r"[^|]*?(?P<used>\d+)\s*/\s*(?P<total>\d+)\s*\|",
    re.MULTILINE,
)
# Below them, the processes; of other containers too if all devices are mapped, with NA for what
# cannot be seen. 26.0 has one more column (vllm-ascend issue 12980):
#
#     | 0       0                 | 632268        | python3.1       | 197                |
PROCESS = re.compile(
    r"^\|\s*(?P<card>\d+)\s+(?P<chip>\d+)\s*\|\s*(?P<pid>\d+|NA)\s*\|\s*(?P<name>[^|]*?)\s*\|"
    r"\s*(?P<memory>\w+)\s*\|",
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
    futures: dict[str, Future] = {}
    whole = {name: value for name, value in machine.environment.items() if name != LIST}
    with ThreadPoolExecutor() as pool:  # what hangs is waited for once
        futures["npu-smi"] = pool.submit(_npu_smi, machine)
        futures["CANN"] = pool.submit(_answer, machine, CANN_PROBE, environment=whole)
        if not own_ray:
            futures["Ray"] = pool.submit(_cluster, machine)
    for name, future in futures.items():
        try:
            answers[name] = future.result()
        except ProbeError as error:
            faults[name] = error
    nodes = machine.glob("/dev/davinci[0-9]*")
    shut = [node for node in (*nodes, *MANAGERS) if not machine.opens(node)]
    if nodes and shut:
        words = f"{len(nodes)} dies, and cannot open {', '.join(shut)}: missing, or not this user's"
        faults["/dev/davinci*"] = ProbeError(words)
    dies, processes = answers.get("npu-smi", ([], {}))
    numbers = sorted(int(node.removeprefix("/dev/davinci")) for node in nodes)
    visible = None
    if LIST in machine.environment:
        given = machine.environment[LIST]
        visible = given.split(",") if given else []
    acl = answers.get("CANN", 0)
    cluster = answers.get("Ray")
    return Seen(dies, processes, numbers, acl, visible, cluster, faults)


def _npu_smi(machine: Machine) -> tuple[list[Die], dict[int, list[str]]]:
    table = machine.run(["npu-smi", "info"])
    dies, processes = read_table(table)
    if not dies:
        words = " ".join(table.split())[:200]
        raise ProbeError(f"npu-smi info shows no NPU, or in an unknown form: {words}")
    return dies, processes


def read_table(table: str) -> tuple[list[Die], dict[int, list[str]]]:
    """The NPUs in the output of `npu-smi info`, and the processes by the number of their die."""
    dies = []
    numbers = {}
    processes: dict[int, list[str]] = {}
    for row in DIE.finditer(table):
        number = int(row["number"] or row["card"])
        numbers[row["card"], row["chip"]] = number
        chip, used, total = map(int, row.group("chip", "used", "total"))
        dies.append(Die(chip, number, row["health"], used, total))
    for row in PROCESS.finditer(table):
        words = f"{row['name']} (process {row['pid']}, {row['memory']} MB)"
        number = numbers.get((row["card"], row["chip"]), -1)
        processes.setdefault(number, []).append(words)
    return dies, processes


def _cluster(machine: Machine) -> Mapping[str, Any] | None:
    """Returns what the running Ray has (ascend/cluster.py); None if none runs."""
    address = machine.environment.get("RAY_ADDRESS", "")
    if address in ("", "auto", "local"):
        if address == "local" or not machine.runs("raylet"):
            return None
        return _answer(machine, RAY_PROBE, "auto")
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
