"""Asks npu-smi, /dev, CANN, the environment and Ray how many NPUs they see."""

import json
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mindspeed_qerl.preflight.case import Die, Seen
from mindspeed_qerl.preflight.machine import Machine, ProbeError
from mindspeed_qerl.preflight.network import fault_of_ray_address, host_and_port
from mindspeed_qerl.preflight.smi import read_table

LIST = "ASCEND_RT_VISIBLE_DEVICES"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# The count of a process whose list of visible devices is not cut: the list is compared by itself.
CANN_PROBE = """
try:
    import acl
    count, error = acl.rt.get_device_count()
    assert error == 0, f"acl.rt.get_device_count() gives error {error}"
except ModuleNotFoundError:
    import torch, torch_npu
    count = torch_npu.npu.device_count()
print("devices", count)
"""
RAY_PROBE = """
import json, os, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.pop("RAY_ADDRESS", None)  # would go before the address that is given
import ray
from mindspeed_qerl.ascend.cluster import look
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("cluster", json.dumps(look()))
"""


def see_npus(machine: Machine, own_ray: bool = False) -> Seen:
    """Ask each part of the machine, with a time limit; Ray unless one is started for the run."""
    shell = machine.environment
    visible, given = shell.get(LIST), shell.get("RAY_ADDRESS", "")
    alone = own_ray or given == "local"  # a Ray of the run's own
    raylets = {} if alone else machine.processes("raylet")
    address = None if alone or given in ("", "auto") else given
    with ThreadPoolExecutor() as pool:  # what hangs is waited for once
        smi = pool.submit(_answer, machine, ["npu-smi", "info"], r"(?s).*")
        cann = pool.submit(_cann, machine)
        ray = pool.submit(_ray, machine, address, bool(raylets))
    table = smi.result()
    dies, held, driver, fault = _smi(table)
    nodes = machine.glob("/dev/davinci[0-9]*")
    closed = []
    for node in (*nodes, *MANAGERS):
        why = machine.closed(node)
        if nodes and why:
            closed.append(f"{node} {why}")
    stale = [
        f"its raylet (process {pid}) was started with {LIST}={environment.get(LIST, 'unset')}"
        for pid, environment in raylets.items()
        if environment and environment.get(LIST) != visible
    ]
    numbers = sorted(int(node.removeprefix("/dev/davinci")) for node in nodes)
    return Seen(
        dies,
        fault,
        held,
        tuple(closed),
        driver,
        tuple(numbers),
        cann.result(),
        visible,
        ray.result(),
        address,
        stale,
    )


def _smi(table: str | ProbeError) -> tuple[list[Die], Any, str | None, ProbeError | None]:
    """Dies, processes on them, the driver's version, and why there are no dies."""
    if isinstance(table, ProbeError):
        return [], {}, None, table
    dies, held = read_table(table)
    driver = re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", table)
    fault = None
    if not dies:
        words = " ".join(table.split())[:200]
        fault = ProbeError(f"npu-smi info shows no NPU, or in an unknown form: {words}")
    return dies, held, driver and driver[1], fault


def _cann(machine: Machine) -> int | ProbeError:
    if not (machine.importable("acl") or machine.importable("torch_npu")):
        return ProbeError("acl and torch_npu are not importable", "missing")
    shell = {name: value for name, value in machine.environment.items() if name != LIST}
    answer = _answer(machine, [sys.executable, "-c", CANN_PROBE], r"(?m)^devices (\d+)$", shell)
    if isinstance(answer, ProbeError):
        return answer
    return int(answer)


def _ray(machine: Machine, address: str | None, running: bool) -> Any:
    if address is None and not running:
        return None
    if address is not None:
        fault = fault_of_ray_address(address)
        if fault:
            return ProbeError(fault)
        place = host_and_port(address)
        if not running and place and not machine.listens(*place):
            return ProbeError("nothing listens there")
    command = [sys.executable, "-c", RAY_PROBE, address or "auto"]
    answer = _answer(machine, command, r"(?m)^cluster (.*)$")
    if isinstance(answer, ProbeError):
        return answer
    return json.loads(answer)


def _answer(
    machine: Machine,
    command: list[str],
    pattern: str,
    environment: Mapping[str, str] | None = None,
) -> str | ProbeError:
    """What `pattern` has found, its last group, in what `command` prints."""
    try:
        output = machine.run(command, environment=environment)
    except ProbeError as error:
        return error
    match = re.search(pattern, output)
    if match is None:
        return ProbeError(f"not understood: {output.strip()[:80]!r}")
    return match[match.lastindex or 0]
