"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses some."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check, Die, Seen
from mindspeed_qerl.preflight.machine import Machine, ProbeError

NO_NPU = ", this machine has none"
LIST = "ASCEND_RT_VISIBLE_DEVICES"
# The count of a process whose list of visible devices is not cut: the list is compared by itself.
CANN_PROBE = """
try:
    import acl
    count, error = acl.rt.get_device_count()
    assert error == 0, f"acl.rt.get_device_count() gives error {error}"
except ImportError:
    import torch, torch_npu
    count = torch_npu.npu.device_count()
print("devices", count)
"""
RAY_PROBE = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
alive = sum(node["Alive"] for node in ray.nodes())
print("cluster", json.dumps({"resources": ray.cluster_resources(), "nodes": alive}))
"""


def see_npus(machine: Machine, own_ray: bool = False) -> Seen:
    """Ask npu-smi, /dev, CANN, the environment and, unless one is started for the run, Ray, each with a time limit."""
    visible = machine.environment.get(LIST)
    raylets = {} if own_ray else machine.processes("raylet")
    ray, cann = None, "acl and torch_npu are not importable"
    if raylets or machine.environment.get("RAY_ADDRESS") and not own_ray:
        ray = _ask(machine, [sys.executable, "-c", RAY_PROBE], r"^cluster (.*)$", json.loads)
    if machine.importable("acl") or machine.importable("torch_npu"):
        without_list = {name: value for name, value in machine.environment.items() if name != LIST}
        cann = _ask(machine, [sys.executable, "-c", CANN_PROBE], r"^devices (\d+)$", int, without_list)
    smi = _ask(machine, ["npu-smi", "info"], r"(?s)(.*)", dies)
    stale = [f"its raylet (process {pid}) was started with {LIST}={environment.get(LIST, 'unset')}"
             for pid, environment in raylets.items() if environment and environment.get(LIST) != visible]
    return Seen(smi or "npu-smi info shows no NPU, or in a form that is not known here",
                len(machine.glob("/dev/davinci[0-9]*")), cann, visible, ray, stale)


def _ask(machine: Machine, command: list[str], pattern: str, read: Callable,
         environment: Mapping[str, str] | None = None) -> Any:
    try:
        output = machine.run(command, environment=environment)
    except ProbeError as error:
        return str(error)
    found = re.search(pattern, output, re.MULTILINE)
    return read(found[1]) if found else f"not understood: {output.strip()[:80]!r}"


def dies(table: str) -> list[Die]:
    """The NPUs in the output of `npu-smi info`: two lines each, name and health above bus and memory. Processes come
    after them.

        | 0     Ascend910           | OK            | 178.5       36                0    / 0             |
        | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |

    On a 910C a card has two chips and the second line a Phy-ID; on a 910B one chip and no Phy-ID.
    """
    found, above = [], None
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        memory = re.search(r"(\d+)\s*/\s*(\d+)$", cells[-1])
        if above and memory and re.fullmatch(r"\d+(\s+\d+)?", cells[0]):
            found.append(Die(above[0], int(cells[0].split()[0]), above[1], int(memory[1]), int(memory[2])))
            above = None
        elif len(cells) == 3 and (name := re.fullmatch(r"(\d+)\s+\S*[^\d\s]\S*", cells[0])):
            above = int(name[1]), cells[1]
    return found


def npus(machine: Machine, case: Case) -> Iterator[Check]:
    """The number that each part sees, from the hardware up to Ray; what loses some is named with its fix."""
    seen, asked = case.seen, case.npus_here
    if not case.on_npus:
        why = "emulate_npu=true" if case.upstream else f"engine={case.recipe.engine}"
        yield Check("ranks", SKIPPED, f"{why} needs none")
        return
    if not seen.any:
        yield Check("ranks", FAILED, f"{case.npus} NPUs are asked for{NO_NPU}", "Rehearse it here: python "
                    f"cli/train_grpo.py --config-name {case.name} engine=local rehearsal.enabled=true")
        cann = seen.cann if isinstance(seen.cann, str) else "it counts 0"
        for name, found in (("npu-smi", seen.smi), ("/dev/davinci*", "none"), ("CANN", cann),
                            (LIST, "not set" if seen.visible is None else seen.visible), ("Ray", _words(seen, case))):
            yield Check(name, SKIPPED, found)
        return
    checks = [_smi(seen, asked), _davinci(seen, asked), _cann(seen, asked, case), _visible(seen, asked, case),
              _ray(seen, case)]
    said = {"npu-smi": sum(die.health == "OK" for die in seen.smi) if isinstance(seen.smi, list) else None,
            "/dev/davinci*": seen.davinci, "CANN": seen.cann, LIST: seen.listed,
            "Ray": _of_ray(seen) if isinstance(seen.ray, Mapping) else None}
    counts = {name: count for name, count in said.items() if isinstance(count, int)}
    lost = [check.name for check in checks if check.state == FAILED]
    wanted = f"{asked} asked for" + (f" here ({case.npus} on {case.nodes} nodes)" if case.nodes > 1 else "")
    found = f"{wanted}; {', '.join(f'{name} {count}' for name, count in counts.items())}"
    least = min(counts.values())
    few = f"{least} of " if lost and least < asked else ""
    yield Check("ranks", FAILED if lost else PASSED, few + found + (f". Lost at {', '.join(lost)}" if lost else ""))
    yield from checks


def _smi(seen: Seen, asked: int) -> Check:
    if isinstance(seen.smi, str):
        return Check("npu-smi", WARNING, f"{seen.smi}; health and memory of the dies are not known",
                     "Map /usr/local/bin/npu-smi and /usr/local/dcmi into the container")
    count = f"{len(seen.smi)} dies"
    if sick := [die for die in seen.smi if die.health != "OK"]:
        names = ", ".join(f"NPU {die.card} chip {die.chip}: {die.health}" for die in sick)
        commands = "".join(f"npu-smi info -t health -i {die.card} -c {die.chip}\n" for die in sick)
        return Check("npu-smi", FAILED, f"{count}, {len(sick)} not healthy: {names}",
                     f"{commands}A faulty die is a case for the vendor. Until then ask for fewer NPUs")
    if len(seen.smi) < asked:
        cards = Counter(die.card for die in seen.smi)
        odd = ", ".join(str(card) for card, chips in cards.items() if chips < max(cards.values()))
        return Check("npu-smi", FAILED, count + (f"; one chip of NPU {odd} is missing" if odd else ""),
                     f"On the host `npu-smi info` should list {asked}: if it does, map all of them into the "
                     "container; if not, it is a case for the vendor")
    if busy := [die for die in seen.smi if die.used > die.total // 8]:
        names = [f"NPU {die.card} chip {die.chip} ({die.used:,} MB)" for die in busy]
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        return Check("npu-smi", WARNING, f"{count}, all healthy; memory in use on {len(busy)}: {shown}",
                     "npu-smi info    # the processes at the end; stop those that are yours and left over")
    return Check("npu-smi", PASSED, f"{count}, all healthy")


def _davinci(seen: Seen, asked: int) -> Check:
    found, more = f"{seen.davinci} device nodes", len(seen.smi) if isinstance(seen.smi, list) else asked
    if seen.davinci < min(asked, more):
        return Check("/dev/davinci*", FAILED, f"{found}: the container maps fewer than the machine has",
                     f"Start the container with --device=/dev/davinci0 ... --device=/dev/davinci{asked - 1} (and "
                     "davinci_manager, devmm_svm, hisi_hdc)")
    return _enough("/dev/davinci*", seen.davinci, asked, found)


def _cann(seen: Seen, asked: int, case: Case) -> Check:
    if isinstance(seen.cann, str):
        return Check("CANN", FAILED, seen.cann, "source /usr/local/Ascend/cann/set_env.sh")
    if seen.cann < min(asked, seen.davinci):
        return Check("CANN", FAILED, f"{seen.cann} of the {seen.davinci} devices come up: a faulty die, or one that "
                     "another container holds", "npu-smi info    # the die whose health is not OK, or that has "
                     f"processes of others\nUntil it is back ask for fewer NPUs: {_layouts(seen.cann, case)}")
    return _enough("CANN", seen.cann, asked, f"acl counts {seen.cann}")


def _visible(seen: Seen, asked: int, case: Case) -> Check:
    if seen.visible is None:
        return Check(LIST, PASSED, "not set: all are visible")
    if seen.listed < asked:
        return Check(LIST, FAILED, f"{seen.listed} entries: {seen.visible or repr('')}",
                     f"unset {LIST}    # in the shell, and where the container sets it\nor ask for fewer NPUs: "
                     f"{_layouts(seen.listed, case)}")
    first = [str(number) for number in range(asked)]
    if seen.visible.split(",")[:asked] != first:
        return Check(LIST, FAILED, f"{seen.visible}: a worker gives Ray's number straight to set_device "
                     "(base_worker.py:89)", f"export {LIST}={','.join(first)}")
    return Check(LIST, PASSED, f"{seen.listed} entries")


def _ray(seen: Seen, case: Case) -> Check:
    words = _words(seen, case)
    restart = (f"ray stop    # it stops every Ray of this user\nray start --head --resources='{{\"NPU\": "
               f"{case.npus_here}}}'")
    if seen.ray is None:
        return _enough("Ray", seen.ray_would_count * case.nodes, case.npus, words)
    if isinstance(seen.ray, str):
        return Check("Ray", FAILED, words, restart)
    count, nodes = _of_ray(seen), seen.ray["nodes"]
    if count >= case.npus:
        return Check("Ray", PASSED, words)
    if count < seen.ray_would_count * nodes:
        why = "; ".join(seen.stale) or "it was started with other --resources, or before the other NPUs were there"
        return Check("Ray", FAILED, f"{words}. It is stale: {why}", restart)
    if nodes < case.nodes:
        return Check("Ray", FAILED, f"{words}: {case.nodes - nodes} nodes are missing",
                     "ray start --address=HEAD:PORT    # on each of them")
    return Check("Ray", WARNING, words, f"After the fix above, start it once more:\n{restart}")


def _of_ray(seen: Seen) -> int:
    return int(seen.ray["resources"].get("NPU", 0))


def _words(seen: Seen, case: Case) -> str:
    if seen.ray is None:
        which = "one of its own" if case.own_ray else "none is running; one"
        return f"{which} that is started now counts {seen.ray_would_count}"
    if isinstance(seen.ray, str):
        return f"one is running and cannot be joined: {seen.ray}"
    nodes = f" on {seen.ray['nodes']} nodes" if seen.ray["nodes"] > 1 or case.nodes > 1 else ""
    return f"one is running with {_of_ray(seen)} NPUs{nodes}"


def _enough(name: str, count: int, asked: int, found: str) -> Check:
    """A part that has enough, or that has no fewer than the one before it: then that one is to be fixed."""
    if count >= asked:
        return Check(name, PASSED, found)
    return Check(name, WARNING, f"{found}: the others are lost above")


def _layouts(npus: int, case: Case) -> str:
    return f"python tools/plan_layout.py --ranks {npus} --model {case.recipe.model.path}"
