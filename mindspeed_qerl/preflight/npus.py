"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses some."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
alive = sum(node["Alive"] for node in ray.nodes())
print("cluster", json.dumps({"resources": ray.cluster_resources(), "nodes": alive}))
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
    smi = _ask(machine, ["npu-smi", "info"], r"(?s)(.*)", dies)
    return Seen(
        smi=smi or "npu-smi info shows no NPU, or in a form that is not known here",
        davinci=len(machine.glob("/dev/davinci[0-9]*")), cann=cann, visible=visible, ray=ray,
        stale=[f"its raylet (process {pid}) was started with "
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


class Part(NamedTuple):
    """A part of the machine, and how many NPUs it sees; None if it was not asked or did not say."""

    check: Check
    count: int | None


def npus(machine: Machine, case: Case) -> Iterator[Check]:
    """The number that each part sees, from the hardware up to Ray; what loses some is named with its fix."""
    if not case.on_npus:
        why = "emulate_npu=true" if case.upstream else f"engine={case.recipe.engine}"
        yield Check("ranks", SKIPPED, f"{why} needs none")
        return
    if not case.seen.any:
        yield from _no_npu(case)
        return
    seen, asked = case.seen, case.npus_here
    parts = [_smi(seen, asked), _davinci(seen, asked), _cann(seen, asked, case), _visible(seen, asked, case),
             _ray(seen, case)]
    counts = {part.check.name: part.count for part in parts if part.count is not None}
    least = min(counts.values(), default=0)
    lost = [part.check.name for part in parts if part.check.state == FAILED]
    summary = ", ".join(f"{name} {count}" for name, count in counts.items())
    wanted = f"{asked} asked for" + (f" here ({case.npus} on {case.nodes} nodes)" if case.nodes > 1 else "")
    if lost:
        few = f"{least} of " if least < asked else ""
        yield Check("ranks", FAILED, f"{few}{wanted}; {summary}. Lost at {', '.join(lost)}")
    else:
        yield Check("ranks", PASSED, f"{wanted}; {summary}")
    yield from (part.check for part in parts)


def _no_npu(case: Case) -> Iterator[Check]:
    seen = case.seen
    rehearse = f"python cli/train_grpo.py --config-name {case.name} engine=local rehearsal.enabled=true"
    yield Check("ranks", FAILED, f"{case.npus} NPUs are asked for{NO_NPU}", f"Rehearse it here: {rehearse}")
    yield Check("npu-smi", SKIPPED, seen.smi)
    yield Check("/dev/davinci*", SKIPPED, "none")
    yield Check("CANN", SKIPPED, seen.cann if isinstance(seen.cann, str) else "it counts 0")
    yield Check("ASCEND_RT_VISIBLE_DEVICES", SKIPPED, "not set" if seen.visible is None else seen.visible)
    yield Check("Ray", SKIPPED, _ray_words(seen, case))


def _smi(seen: Seen, asked: int) -> Part:
    if isinstance(seen.smi, str):
        return Part(Check("npu-smi", WARNING, f"{seen.smi}; health and memory of the dies are not known",
                          "Map /usr/local/bin/npu-smi and /usr/local/dcmi into the container"), None)
    sick = [die for die in seen.smi if die.health != "OK"]
    if sick:
        names = ", ".join(f"NPU {die.card} chip {die.chip}: {die.health}" for die in sick)
        commands = [f"npu-smi info -t health -i {die.card} -c {die.chip}" for die in sick]
        return Part(Check("npu-smi", FAILED, f"{len(seen.smi)} dies, {len(sick)} not healthy: {names}", "\n".join(
            [*commands, "A faulty die is a case for the vendor. Until then ask for fewer NPUs"])),
                    len(seen.smi) - len(sick))
    return Part(_healthy(seen.smi, asked), len(seen.smi))


def _healthy(smi: list[Die], asked: int) -> Check:
    """Enough dies, and free? All of them are healthy."""
    if len(smi) < asked:
        cards = Counter(die.card for die in smi)
        odd = ", ".join(str(card) for card, chips in cards.items() if chips < max(cards.values()))
        return Check("npu-smi", FAILED, f"{len(smi)} dies" + (f"; one chip of NPU {odd} is missing" if odd else ""),
                     f"On the host `npu-smi info` should list {asked}: if it does, map all of them into the "
                     "container; if not, it is a case for the vendor")
    busy = [die for die in smi if die.used > die.total // 8]
    if busy:
        names = [f"NPU {die.card} chip {die.chip} ({die.used:,} MB)" for die in busy]
        shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
        return Check("npu-smi", WARNING, f"{len(smi)} dies, all healthy; memory in use on {len(busy)}: {shown}",
                     "npu-smi info    # the processes at the end; stop those that are yours and left over")
    return Check("npu-smi", PASSED, f"{len(smi)} dies, all healthy")


def _davinci(seen: Seen, asked: int) -> Part:
    name, more = "/dev/davinci*", len(seen.smi) if isinstance(seen.smi, list) else asked
    if seen.davinci < asked and seen.davinci < more:
        return Part(Check(name, FAILED, f"{seen.davinci} device nodes: the container maps fewer than the machine has",
                          f"Start the container with --device=/dev/davinci0 ... --device=/dev/davinci{asked - 1} (and "
                          "davinci_manager, devmm_svm, hisi_hdc)"), seen.davinci)
    return Part(_enough(name, seen.davinci, asked, f"{seen.davinci} device nodes"), seen.davinci)


def _cann(seen: Seen, asked: int, case: Case) -> Part:
    if isinstance(seen.cann, str):
        return Part(Check("CANN", FAILED, seen.cann, "source /usr/local/Ascend/cann/set_env.sh"), None)
    if seen.cann < asked and seen.cann < seen.davinci:
        return Part(Check(
            "CANN", FAILED, f"{seen.cann} of the {seen.davinci} devices come up: a faulty die, or one that another "
            "container holds", "npu-smi info    # the die whose health is not OK, or that has processes of others\n"
            f"Until it is back ask for fewer NPUs: {_layouts(seen.cann, case)}"), seen.cann)
    return Part(_enough("CANN", seen.cann, asked, f"acl counts {seen.cann}"), seen.cann)


def _visible(seen: Seen, asked: int, case: Case) -> Part:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    if seen.visible is None:
        return Part(Check(name, PASSED, "not set: all are visible"), None)
    if seen.listed < asked:
        return Part(Check(name, FAILED, f"{seen.listed} entries: {seen.visible or repr('')}",
                          f"unset {name}    # in the shell, and where the container sets it\nor ask for fewer NPUs: "
                          f"{_layouts(seen.listed, case)}"), seen.listed)
    if seen.visible.split(",")[:asked] != [str(i) for i in range(asked)]:
        why = "a worker gives Ray's number straight to set_device (base_worker.py:89)"
        return Part(Check(name, FAILED, f"{seen.visible}: {why}", f"export {name}={','.join(map(str, range(asked)))}"),
                    seen.listed)
    return Part(Check(name, PASSED, f"{seen.listed} entries"), seen.listed)


def _ray(seen: Seen, case: Case) -> Part:
    words, asked = _ray_words(seen, case), case.npus
    start = f"ray start --head --resources='{{\"NPU\": {case.npus_here}}}'"
    restart = f"ray stop    # it stops every Ray of this user\n{start}"
    if seen.ray is None:
        return Part(_enough("Ray", seen.ray_would_count * case.nodes, asked, words), None)
    if isinstance(seen.ray, str):
        return Part(Check("Ray", FAILED, words, restart), None)
    count = int(seen.ray["resources"].get("NPU", 0))
    if count >= asked:
        return Part(Check("Ray", PASSED, words), count)
    if count < seen.ray_would_count * seen.ray["nodes"]:
        why = "; ".join(seen.stale) or "it was started with other --resources, or before the other NPUs were there"
        return Part(Check("Ray", FAILED, f"{words}. It is stale: {why}", restart), count)
    if seen.ray["nodes"] < case.nodes:
        return Part(Check("Ray", FAILED, f"{words}: {case.nodes - seen.ray['nodes']} nodes are missing",
                          "ray start --address=HEAD:PORT    # on each of them"), count)
    return Part(Check("Ray", WARNING, words, f"After the fix above, start it once more:\n{restart}"), count)


def _ray_words(seen: Seen, case: Case) -> str:
    if seen.ray is None:
        which = "one of its own" if case.own_ray else "none is running; one"
        return f"{which} that is started now counts {seen.ray_would_count}"
    if isinstance(seen.ray, str):
        return f"one is running and cannot be joined: {seen.ray}"
    nodes = f" on {seen.ray['nodes']} nodes" if seen.ray["nodes"] > 1 or case.nodes > 1 else ""
    return f"one is running with {int(seen.ray['resources'].get('NPU', 0))} NPUs{nodes}"


def _enough(name: str, count: int, asked: int, found: str) -> Check:
    """A part that has enough, or that has no fewer than the one before it: then that one is to be fixed."""
    if count >= asked:
        return Check(name, PASSED, found)
    return Check(name, WARNING, f"{found}: the others are lost above")


def _layouts(npus: int, case: Case) -> str:
    return f"python tools/plan_layout.py --ranks {npus} --model {case.model_dir}"
