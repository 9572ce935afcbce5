"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses some."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine, ProbeError


@dataclass(frozen=True)
class Die:
    """One NPU as `npu-smi info` shows it; memory in MB."""

    card: int
    chip: int
    health: str
    used: int
    total: int


@dataclass(frozen=True)
class Seen:
    """How many NPUs each part of the machine sees: a number, or a sentence why it could not be asked."""

    smi: list[Die] | str = "not asked"  # at least one
    davinci: int = 0
    cann: int | str = "not asked"
    visible: str | None = None  # ASCEND_RT_VISIBLE_DEVICES
    ray: Mapping[str, Any] | str | None = None  # resources and nodes of the running cluster; None if there is none
    stale: list[str] = field(default_factory=list)  # how the environment of the running Ray differs from the shell's

    @property
    def any(self) -> bool:
        return bool(self.davinci or isinstance(self.smi, list) or isinstance(self.cann, int) and self.cann)

    @property
    def listed(self) -> int | None:
        """Entries of ASCEND_RT_VISIBLE_DEVICES as Ray counts them; None if it is not set
        (ray/_private/accelerators/npu.py)."""
        if self.visible is None:
            return None
        return len(self.visible.split(",")) if self.visible not in ("", "NoDevFiles") else 0

    @property
    def ray_would_count(self) -> int:
        """NPUs that a Ray started in this shell would have: CANN's count, else the device nodes, no more than the list
        has."""
        count = self.cann if isinstance(self.cann, int) else self.davinci
        return count if self.listed is None else min(count, self.listed)


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
print("cluster", json.dumps({"resources": ray.cluster_resources(), "nodes": sum(node["Alive"] for node in ray.nodes())}))
"""


def see_npus(machine: Machine, own_ray: bool = False) -> Seen:
    """Ask npu-smi, /dev, CANN, the environment and, unless one is started for the run, Ray, each with a time limit."""
    without_list = {name: value for name, value in machine.environment.items() if name != "ASCEND_RT_VISIBLE_DEVICES"}
    visible = machine.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    raylets = [] if own_ray else machine.processes("raylet")
    ray = None
    if raylets or machine.environment.get("RAY_ADDRESS") and not own_ray:
        ray = _ask(machine, [sys.executable, "-c", RAY_PROBE], r"^cluster (.*)$", json.loads)
    cann = "acl and torch_npu are not importable"
    if machine.importable("acl") or machine.importable("torch_npu"):
        cann = _ask(machine, [sys.executable, "-c", CANN_PROBE], r"^devices (\d+)$", int, without_list)
    theirs = {raylet.pid: raylet.environment.get("ASCEND_RT_VISIBLE_DEVICES") for raylet in raylets
              if raylet.environment}
    return Seen(
        smi=_ask(machine, ["npu-smi", "info"], r"(?s)(.*)", dies) or "npu-smi info shows no NPU, or in a form that is "
        "not known here", davinci=len(machine.glob("/dev/davinci[0-9]*")), cann=cann, visible=visible,
        ray=ray, stale=[f"its raylet (process {pid}) was started with "
                        f"ASCEND_RT_VISIBLE_DEVICES={'unset' if list_ is None else list_}"
                        for pid, list_ in theirs.items() if list_ != visible])


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


NO_NPU = ", this machine has none"


def npus(machine: Machine, case: Case) -> Iterator[Check]:
    """The number that each part sees, from the hardware up to Ray; what loses some is named with its fix."""
    if not case.on_npus:
        why = "emulate_npu=true" if case.upstream else f"engine={case.recipe.engine}"
        yield Check("ranks", SKIPPED, f"{why} needs none")
        return
    seen, asked = case.seen, case.npus_here
    rehearse = f"python cli/train_grpo.py --config-name {case.name} engine=local rehearsal.enabled=true"
    if not seen.any:
        yield Check("ranks", FAILED, f"{case.npus} NPUs are asked for{NO_NPU}", f"Rehearse it here: {rehearse}")
        yield Check("npu-smi", SKIPPED, seen.smi)
        yield Check("/dev/davinci*", SKIPPED, "none")
        yield Check("CANN", SKIPPED, seen.cann if isinstance(seen.cann, str) else "it counts 0")
        yield Check("ASCEND_RT_VISIBLE_DEVICES", SKIPPED, "not set" if seen.visible is None else seen.visible)
        yield Check("Ray", SKIPPED, _ray_words(seen, case))
        return

    lines, counts = [], {}
    for line, count in (_smi(seen, asked), _davinci(seen, asked), _cann(seen, asked, case),
                        _visible(seen, asked, case), _ray(seen, case)):
        lines.append(line)
        if count is not None:
            counts[line.name] = count
    least = min(counts.values(), default=0)
    culprits = [line for line in lines if line.state == FAILED]
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    wanted = f"{asked} asked for" + (f" here ({case.npus} on {case.nodes} nodes)" if case.nodes > 1 else "")
    if culprits:
        few = f"{least} of " if least < asked else ""
        yield Check("ranks", FAILED, f"{few}{wanted}; {summary}. Lost at {', '.join(line.name for line in culprits)}")
    else:
        yield Check("ranks", PASSED, f"{wanted}; {summary}")
    yield from lines


def _smi(seen: Seen, asked: int) -> tuple[Check, int | None]:
    if isinstance(seen.smi, str):
        return Check("npu-smi", WARNING, f"{seen.smi}; health and memory of the dies are not known",
                     "Map /usr/local/bin/npu-smi and /usr/local/dcmi into the container"), None
    sick = [die for die in seen.smi if die.health != "OK"]
    if sick:
        names = ", ".join(f"NPU {die.card} chip {die.chip}: {die.health}" for die in sick)
        return Check("npu-smi", FAILED, f"{len(seen.smi)} dies, {len(sick)} not healthy: {names}",
                     "\n".join(f"npu-smi info -t health -i {die.card} -c {die.chip}" for die in sick)
                     + "\nA faulty die is a case for the vendor. Until then ask for fewer NPUs"), len(seen.smi) - len(sick)
    if len(seen.smi) < asked:
        cards = Counter(die.card for die in seen.smi)
        odd = [card for card, chips in cards.items() if chips < max(cards.values())]
        return Check("npu-smi", FAILED, f"{len(seen.smi)} dies" + (f"; one chip of NPU {', '.join(map(str, odd))} is "
                                                                   "missing" if odd else ""),
                     f"On the host `npu-smi info` should list {asked}: if it does, map all of them into the "
                     "container; if not, it is a case for the vendor"), len(seen.smi)
    busy = [die for die in seen.smi if die.used > die.total // 8]
    if busy:
        names = ", ".join(f"NPU {die.card} chip {die.chip} ({die.used:,} MB)" for die in busy[:4]) + (" ..."
                                                                                                      if len(busy) > 4
                                                                                                      else "")
        return Check("npu-smi", WARNING, f"{len(seen.smi)} dies, all healthy; memory in use on {len(busy)}: {names}",
                     "npu-smi info    # the processes at the end; stop those that are yours and left over"), len(seen.smi)
    return Check("npu-smi", PASSED, f"{len(seen.smi)} dies, all healthy"), len(seen.smi)


def _davinci(seen: Seen, asked: int) -> tuple[Check, int]:
    more = len(seen.smi) if isinstance(seen.smi, list) else asked
    if seen.davinci < asked and seen.davinci < more:
        return Check("/dev/davinci*", FAILED,
                     f"{seen.davinci} device nodes: the container maps fewer than the machine has",
                     f"Start the container with --device=/dev/davinci0 ... --device=/dev/davinci{asked - 1} (and "
                     "davinci_manager, devmm_svm, hisi_hdc)"), seen.davinci
    return _enough("/dev/davinci*", seen.davinci, asked, f"{seen.davinci} device nodes"), seen.davinci


def _cann(seen: Seen, asked: int, case: Case) -> tuple[Check, int | None]:
    if isinstance(seen.cann, str):
        return Check("CANN", FAILED, seen.cann, "source /usr/local/Ascend/cann/set_env.sh"), None
    if seen.cann < asked and seen.cann < seen.davinci:
        return Check("CANN", FAILED, f"{seen.cann} of the {seen.davinci} devices come up: a faulty die, or one that "
                     "another container holds",
                     "npu-smi info    # the die whose health is not OK, or that has processes of others\n"
                     f"Until it is back ask for fewer NPUs: {_layouts(seen.cann, case)}"), seen.cann
    return _enough("CANN", seen.cann, asked, f"acl counts {seen.cann}"), seen.cann


def _visible(seen: Seen, asked: int, case: Case) -> tuple[Check, int | None]:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    if seen.visible is None:
        return Check(name, PASSED, "not set: all are visible"), None
    if seen.listed < asked:
        return Check(name, FAILED, f"{seen.listed} entries: {seen.visible or repr('')}",
                     f"unset {name}    # in the shell, and where the container sets it\nor ask for fewer NPUs: "
                     f"{_layouts(seen.listed, case)}"), seen.listed
    if seen.visible.split(",")[:asked] != [str(i) for i in range(asked)]:
        return Check(name, FAILED,
                     f"{seen.visible}: a worker gives Ray's number straight to set_device (base_worker.py:89)",
                     f"export {name}={','.join(map(str, range(asked)))}"), seen.listed
    return Check(name, PASSED, f"{seen.listed} entries"), seen.listed


def _ray(seen: Seen, case: Case) -> tuple[Check, int | None]:
    words, asked = _ray_words(seen, case), case.npus
    restart = f"ray stop    # it stops every Ray of this user\nray start --head --resources='{{\"NPU\": {case.npus_here}}}'"
    if seen.ray is None:
        count = seen.ray_would_count * case.nodes
        return _enough("Ray", count, asked, words), None
    if isinstance(seen.ray, str):
        return Check("Ray", FAILED, words, restart), None
    count = int(seen.ray["resources"].get("NPU", 0))
    if count >= asked:
        return Check("Ray", PASSED, words), count
    if count < seen.ray_would_count * seen.ray["nodes"]:
        why = "; ".join(seen.stale) or "it was started with other --resources, or before the other NPUs were there"
        return Check("Ray", FAILED, f"{words}. It is stale: {why}", restart), count
    if seen.ray["nodes"] < case.nodes:
        return Check("Ray", FAILED, f"{words}: {case.nodes - seen.ray['nodes']} nodes are missing",
                     "ray start --address=HEAD:PORT    # on each of them"), count
    return Check("Ray", WARNING, words, "After the fix above, start it once more:\n" + restart), count


def _ray_words(seen: Seen, case: Case) -> str:
    if seen.ray is None:
        return f"{'one of its own' if case.own_ray else 'none is running; one'} that is started now counts {seen.ray_would_count}"
    if isinstance(seen.ray, str):
        return f"one is running and cannot be joined: {seen.ray}"
    nodes = f" on {seen.ray['nodes']} nodes" if seen.ray["nodes"] > 1 or case.nodes > 1 else ""
    return f"one is running with {int(seen.ray['resources'].get('NPU', 0))} NPUs{nodes}"


def _enough(name: str, count: int, asked: int, found: str) -> Check:
    """A part that has enough, or that has no fewer than the one before it: then that one is to be fixed."""
    return Check(name, PASSED, found) if count >= asked else Check(name, WARNING,
                                                                   f"{found}: the others are lost above")


def _layouts(npus: int, case: Case) -> str:
    return f"python tools/plan_layout.py --ranks {npus} --model {case.model_dir}"
