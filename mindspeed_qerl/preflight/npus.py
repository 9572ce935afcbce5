"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses
some.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mindspeed_qerl.ascend.cluster import holders, placed
from mindspeed_qerl.ascend.imports import DRIVER, SOURCE, way_out
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.preflight.case import (
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    Die,
    Seen,
    gigabytes,
    quoted,
)
from mindspeed_qerl.preflight.machine import Machine, ProbeError
from mindspeed_qerl.preflight.network import fault_of_ray_address, host_and_port

NO_NPU = ", this machine has none"
LIST = "ASCEND_RT_VISIBLE_DEVICES"
MIB = 2**20
# What a die that nobody uses shows, and some: of 64 GB public reports have 2.7 to 3.5 GB.
IDLE = 1 / 8
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
PLOG = "grep -rh ERROR ~/ascend/log/debug/plog | tail    # CANN's own words; ASCEND_PROCESS_LOG_PATH moves it"
# Of acl, in words (CANN's aclError; torch_npu says "Failed to start the device" of the first).
ACL_ERRORS = {"507033": "a device cannot be started"}
# Words of npu-smi -> what to do; the first that is there counts.
SMI_FIXES = {
    "no answer": "ps -eo pid,stat,args | grep npu-smi    # in state D it hangs inside the driver, as a run would\n"
    "dmesg | grep -i -E 'davinci|hisi|drv' | tail    # on the host; then a reset or reboot by its owner",
    "shared librar": DRIVER,
    "not installed": "Map /usr/local/bin/npu-smi and /usr/local/dcmi into the container",
    "": "On the host: npu-smi info. If it answers there, map davinci_manager, devmm_svm, hisi_hdc, /usr/local/dcmi "
    'and /usr/local/Ascend/driver into the container; "device is used" is another container with the same dies',
}
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
    """Ask npu-smi, /dev, CANN, the environment and, unless one is started for the run, Ray, each
    with a time limit.
    """
    visible = machine.environment.get(LIST)
    given = machine.environment.get("RAY_ADDRESS", "")
    raylets = (
        {} if own_ray or given == "local" else machine.processes("raylet")
    )  # local: a Ray of the run's own
    address = None if own_ray or given in ("", "auto", "local") else given
    without_list = {name: value for name, value in machine.environment.items() if name != LIST}
    asked: dict[str, Any] = {"ray": None, "cann": "acl and torch_npu are not importable"}
    with ThreadPoolExecutor() as pool:  # what hangs is waited for once

        def ask(what: str, *question: Any) -> None:
            asked[what] = pool.submit(_ask, machine, *question)

        ask("smi", ["npu-smi", "info"], r"(?s)(.*)", str)
        if machine.importable("acl") or machine.importable("torch_npu"):
            ask("cann", [sys.executable, "-c", CANN_PROBE], r"^devices (\d+)$", int, without_list)
        if address and (fault := fault_of_ray_address(address)):
            asked["ray"] = fault
        elif address and not raylets and not machine.listens(*host_and_port(address)):
            asked["ray"] = "nothing listens there"
        elif raylets or address:
            ask(
                "ray",
                [sys.executable, "-c", RAY_PROBE, address or "auto"],
                r"^cluster (.*)$",
                json.loads,
            )
    smi, cann, ray = (
        answer.result() if isinstance(answer := asked[what], Future) else answer
        for what in ("smi", "cann", "ray")
    )
    driver = re.search(r"npu-smi\s+\S+\s+Version:\s*(\S+)", smi)
    said = " ".join(smi.split())[:200]
    nodes = machine.glob("/dev/davinci[0-9]*")
    stale = [
        f"its raylet (process {pid}) was started with {LIST}={environment.get(LIST, 'unset')}"
        for pid, environment in raylets.items()
        if environment and environment.get(LIST) != visible
    ]
    closed = tuple(
        f"{node} {why}" for node in (*nodes, *MANAGERS) if nodes and (why := machine.closed(node))
    )
    return Seen(
        dies(smi)
        or (
            said
            if said.startswith("npu-smi:") or "not installed" in said
            else f"npu-smi info shows no NPU, or in a form that is not known here: {said}"
        ),
        processes(smi),
        closed,
        driver and driver[1],
        tuple(sorted(int(node.removeprefix("/dev/davinci")) for node in nodes)),
        cann,
        visible,
        ray,
        address,
        stale,
    )


def _ask(
    machine: Machine,
    command: list[str],
    pattern: str,
    read: Callable,
    environment: Mapping[str, str] | None = None,
) -> Any:
    try:
        output = machine.run(command, environment=environment)
    except ProbeError as error:
        return str(error)
    found = re.search(pattern, output, re.MULTILINE)
    return read(found[1]) if found else f"not understood: {output.strip()[:80]!r}"


def dies(table: str) -> list[Die]:
    """The NPUs in the output of `npu-smi info`: two lines each, below two lines of titles that say
    what is in them.

        | NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
        | Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
        | 0     Ascend910           | OK            | 178.5       36                0    / 0             |
        | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |

    The number of a die's /dev/davinci* is its Phy-ID (910C, two chips a card) or Device (310P),
    else that of the card (910B). Memory is that of HBM, else the other; one that is not told is
    None.
    """
    titles: dict[str, list[str]] = {}
    found, above = [], {}
    for cells in _rows(table):
        first = cells[0].partition(" ")[0]
        if first in ("NPU", "Chip"):
            if "Process id" in cells:
                break
            titles[first] = cells
        elif len(titles) < 2 or not first.isdecimal():
            above = {}
        elif not above:
            above = _named(titles["NPU"], cells)
        else:
            below = _named(titles["Chip"], cells)
            card, chip = above.get("NPU", ""), below.get("Chip", "")
            number = below.get("Phy-ID") or below.get("Device") or card
            usages = [below.get("HBM-Usage", ""), below.get("Memory-Usage", "")]
            told = [usage for usage in usages if re.fullmatch(r"\d+/0*[1-9]\d*", usage)]
            used, total = map(int, told[0].split("/")) if told else (None, None)
            if all(each.isdecimal() for each in (card, chip, number)):
                found.append(
                    Die(int(card), int(chip), int(number), above.get("Health", ""), used, total)
                )
            above = {}
    return found


def processes(table: str) -> dict[int, list[str]] | None:
    """The processes in the output of `npu-smi info`, by the number of their die; None if it has no
    table of them. Those of other containers are there too, if all devices are, with NA for what
    cannot be seen; 26.0 has one more column (vllm-ascend issue 12980).

        | NPU     Chip   | Process id    | Process name    | Process memory(MB)    | Process id in container |
        | 0       0      | 632268        | python3.1       | 197                   | NA                      |
    """
    numbers = {(str(die.card), str(die.chip)): die.number for die in dies(table)}
    titles, found = None, {}
    for cells in _rows(table):
        if "Process id" in cells:
            titles = cells
        elif titles:
            row = _named(titles, cells)
            place = row.get("NPU", ""), row.get("Chip", "0")
            if place in numbers:
                name, memory = (
                    row.get("Process name") or "a process",
                    row.get("Process memory", "NA"),
                )
                pid = row.get("Process id", "NA")
                found.setdefault(numbers[place], []).append(f"{name} (process {pid}, {memory} MB)")
    return found if titles else None


def _rows(table: str) -> Iterator[list[str]]:
    """The cells of each line of a table, without a terminal's colours; [""] for a line between."""
    for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", table).splitlines():
        line = line.strip()
        yield (
            [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
            if line[:1] == "|"
            else [""]
        )


def _named(titles: list[str], cells: list[str]) -> dict[str, str]:
    """What stands below each title. A cell has several, and as many values, but for the title of a
    process, which is of several words; units are left out.

    >>> _named(["NPU   Name", "Temp(C)   Hugepages-Usage(page"], ["0     Ascend910", "36          0    / 15"])
    {'NPU': '0', 'Name': 'Ascend910', 'Temp': '36', 'Hugepages-Usage': '0/15'}
    """
    named = {}
    for title, cell in zip(titles, cells):
        title = re.sub(r"\s*\([^)]*\)?", "", title)
        names = [title] if title.startswith("Process") else title.split()
        values = re.sub(r"\s*/\s*", "/", cell).split() if len(names) > 1 else [cell]
        named |= zip(names, values)
    return named


def npus(machine: Machine, case: Case) -> Iterator[Check]:
    """The number that each part sees, from the hardware up to Ray; what loses some is named with
    its fix.
    """
    seen, asked = case.seen, case.npus_here
    if not case.on_npus:
        why = "emulate_npu=true" if case.upstream else f"engine={case.recipe.engine}"
        yield Check("ranks", SKIPPED, f"{why} needs none")
        return
    if not seen.any:
        yield Check(
            "ranks",
            FAILED,
            f"{case.npus} NPUs are asked for{NO_NPU}",
            "Rehearse it here: python "
            f"cli/train_grpo.py --config-name {case.name} engine=local rehearsal.enabled=true",
        )
        cann = seen.cann if isinstance(seen.cann, str) else "it counts 0"
        for name, found in (
            ("npu-smi", seen.smi),
            ("/dev/davinci*", "none"),
            ("CANN", cann),
            (LIST, "not set" if seen.visible is None else seen.visible),
            ("Ray", _words(seen, case)),
        ):
            yield Check(name, SKIPPED, found)
        return
    checks = [
        _smi(seen, asked, case),
        *_held(seen, asked),
        _davinci(seen, asked),
        _cann(seen, asked, case),
        _visible(seen, asked, case),
        *_container(machine, seen),
        _ray(seen, case),
        *_groups(seen, case),
    ]
    said = {
        "npu-smi": sum(not die.sick for die in seen.smi) if isinstance(seen.smi, list) else None,
        "/dev/davinci*": seen.davinci,
        "CANN": seen.cann,
        LIST: seen.listed,
        "Ray": _free(seen) if isinstance(seen.ray, Mapping) else None,
    }
    counts = {name: count for name, count in said.items() if isinstance(count, int)}
    lost = [
        check.name for check in checks if check.state == FAILED and not case.accepts(check.name)
    ]
    wanted = f"{asked} asked for" + (
        f" here ({case.npus} on {case.nodes} nodes)" if case.nodes > 1 else ""
    )
    found = f"{wanted}; {', '.join(f'{name} {count}' for name, count in counts.items())}"
    least = min(counts.values())
    few = f"{least} of " if lost and least < asked else ""
    yield Check(
        "ranks",
        FAILED if lost else PASSED,
        few + found + (f". Lost at {', '.join(lost)}" if lost else ""),
    )
    yield from checks


def _smi(seen: Seen, asked: int, case: Case) -> Check:
    if isinstance(seen.smi, str):
        fix = next(fix for words, fix in SMI_FIXES.items() if words in seen.smi)
        return Check(
            "npu-smi",
            FAILED if "no answer" in seen.smi else WARNING,
            f"{seen.smi}; health and memory of the dies are not known",
            fix,
        )
    count, taken = (
        f"{len(seen.smi)} dies",
        seen.taken(asked),
    )  # Ray's number goes straight to set_device
    sick = [die for die in seen.smi if die.sick]
    healthy = [die.number for die in seen.smi if not die.sick]
    if sick:
        count += f", {len(sick)} not healthy: " + ", ".join(
            f"{_name(die)}: {die.health}" for die in sick
        )
    if faulty := [die for die in sick if die in taken]:
        commands = "".join(
            f"npu-smi info -t health -i {die.card} -c {die.chip}\n" for die in faulty
        )
        return Check(
            "npu-smi",
            FAILED,
            f"{count}; the run would use {_numbers(die.number for die in faulty)}, of the "
            f"first {asked} that are mapped",
            f"{commands}A faulty die is a case for the vendor. Until then "
            + (
                f"start the container with others, without it:{_devices(healthy[:asked])}\n"
                f"{LIST} cannot leave it out: a worker gives Ray's number straight to set_device "
                "(base_worker.py:89)"
                if len(healthy) >= asked
                else f"ask for fewer NPUs, of the {len(healthy)} that are healthy"
            ),
        )
    if len(seen.smi) < asked:
        cards = Counter(die.card for die in seen.smi)
        odd = ", ".join(str(card) for card, chips in cards.items() if chips < max(cards.values()))
        return Check(
            "npu-smi",
            FAILED,
            count + (f"; one chip of NPU {odd} is missing" if odd else ""),
            f"On the host `npu-smi info` should list {asked}: if it does, map all of them into the "
            "container; if not, it is a case for the vendor",
        )
    if all(die.healthy for die in seen.smi):
        count += ", all healthy"
    if busy := [die for die in taken if die.total and die.used > die.total * IDLE]:
        return _busy(busy, count, case)
    if sick:
        them = "it" if len(sick) == 1 else "them"
        count += f"; the run does not use {them}: it takes the first {asked} that are mapped"
    if untold := list(_untold(seen)):
        return Check(
            "npu-smi",
            WARNING,
            f"{count}; {'; '.join(untold)}",
            "npu-smi info    # look yourself: are the dies of the run well, and free?",
        )
    return Check("npu-smi", PASSED, count)


def _untold(seen: Seen) -> Iterator[str]:
    """What the table of npu-smi does not tell, or in words that are not known here."""
    words = Counter(die.health for die in seen.smi if not die.healthy and not die.sick)
    for word, count in words.items():
        yield f"of {count} the health is {word!r}" + (
            "" if word.lower() == "warning" else ", which is not known here"
        )
    if without := sum(die.total is None for die in seen.smi):
        yield f"of {without} no memory is told"
    if seen.held is None:
        yield "processes on them are not told"


def _busy(busy: list[Die], count: str, case: Case) -> Check:
    """Memory that somebody holds on dies that the run takes, against the plan's."""
    names = [f"{_name(die)} ({die.used:,} of {die.total:,} MB)" for die in busy]
    found = f"{count}; memory in use on {len(busy)}: {', '.join(names[:4])}" + (
        " ..." if len(names) > 4 else ""
    )
    fix = "npu-smi info    # the processes at the end; stop those that are yours and left over"
    if not case.legal:
        return Check("npu-smi", WARNING, found, fix)
    held = estimate(case.plan, settings_of(case.recipe))
    most = max(busy, key=lambda die: die.used)
    used, left = most.used * MIB, (most.total - most.used) * MIB
    cache, answer = held.kv_cache - used, held.kv_token * case.plan.batch.max_model_len
    if held.peak > left:
        return Check(
            "npu-smi",
            FAILED,
            f"{found}. The plan's {gigabytes(held.peak)} do not fit into the "
            f"{gigabytes(left)} that are left",
            fix,
        )
    if (
        cache < answer
    ):  # vLLM counts what others hold as used by itself (vllm-ascend worker_v1.py:241-248)
        return Check(
            "npu-smi",
            FAILED,
            f"{found}. It comes off vLLM's KV cache, of which the plan has "
            f"{gigabytes(held.kv_cache)}: nothing would be left for an answer of full length",
            fix,
        )
    return Check(
        "npu-smi",
        WARNING,
        f"{found}. The plan's {gigabytes(held.peak)} fit beside it, and "
        f"{gigabytes(cache)} of KV cache are left",
        fix,
    )


def _held(seen: Seen, asked: int) -> Iterator[Check]:
    """Processes on dies that the run takes, however little they hold: HCCL listens on one port of a
    die's own network interface (vllm-ascend issues 1955, 4725 and 11968).
    """
    held = {
        die.number: seen.held[die.number]
        for die in seen.taken(asked)
        if die.number in (seen.held or ())
    }
    if held:
        first = [f"davinci{number}: {', '.join(names)}" for number, names in held.items()]
        more = f" and {len(first) - 4} more" if len(first) > 4 else ""
        yield Check(
            "processes on the dies",
            WARNING,
            f"{'; '.join(first[:4])}{more}. If one of them uses HCCL, this "
            'run cannot listen on the die\'s port ("specific port[16666] fail")',
            "ps -o pid,ppid,user,args -p PID    # on the host; end those that are yours, and of what docker "
            "stop has left the parent\nor take other dies: another container, without --privileged",
        )


def _name(die: Die) -> str:
    return f"NPU {die.card} chip {die.chip}"


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"davinci{number}" for number in numbers)


def _devices(numbers: Iterable[int]) -> str:
    return "".join(f" --device=/dev/davinci{number}" for number in numbers)


def _davinci(seen: Seen, asked: int) -> Check:
    if seen.closed:
        return Check(
            "/dev/davinci*",
            FAILED,
            f"{seen.davinci} device nodes, and {'; '.join(seen.closed[:4])}"
            + (f"; and {len(seen.closed) - 4} more" if len(seen.closed) > 4 else ""),
            "Start the container with --device=/dev/davinci_manager --device=/dev/devmm_svm "
            "--device=/dev/hisi_hdc, and as root with --cap-add DAC_OVERRIDE,\nor with --group-add and the "
            "group of the nodes (ls -ln /dev/davinci*)",
        )
    found, more = (
        f"{seen.davinci} device nodes",
        len(seen.smi) if isinstance(seen.smi, list) else asked,
    )
    if seen.davinci < min(asked, more):
        return Check(
            "/dev/davinci*",
            FAILED,
            f"{found}: the container maps fewer than the machine has",
            f"Start the container with --device=/dev/davinci0 ... --device=/dev/davinci{asked - 1} (and "
            "davinci_manager, devmm_svm, hisi_hdc)",
        )
    return _enough("/dev/davinci*", seen.davinci, asked, found)


def _cann(seen: Seen, asked: int, case: Case) -> Check:
    if isinstance(seen.cann, str):
        if code := re.search(r"gives error (\d+)", seen.cann):
            meaning = f": {ACL_ERRORS[code[1]]}" if code[1] in ACL_ERRORS else ""
            return Check(
                "CANN",
                FAILED,
                seen.cann + meaning,
                f"{PLOG}\nnpu-smi info    # a die that is not OK, or "
                "that a process of another container has\ncat /usr/local/Ascend/driver/version.info    # "
                "older than CANN? docs/ascend.md has the pair",
            )
        return Check(
            "CANN",
            FAILED,
            seen.cann,
            way_out(seen.cann) if "shared object" in seen.cann else SOURCE,
        )
    if seen.cann < min(asked, seen.davinci):
        return Check(
            "CANN",
            FAILED,
            f"{seen.cann} of the {seen.davinci} devices come up: a faulty die, or one that "
            "another container holds",
            "npu-smi info    # the die whose health is not OK, or that has "
            f"processes of others\nUntil it is back ask for fewer NPUs: {_layouts(seen.cann, case)}",
        )
    return _enough("CANN", seen.cann, asked, f"acl counts {seen.cann}")


def _visible(seen: Seen, asked: int, case: Case) -> Check:
    if seen.visible is None:
        return Check(LIST, PASSED, "not set: all are visible")
    entries = seen.visible.split(",") if seen.listed else []
    odd = [entry for entry in entries if not entry.isdecimal()]
    twice = [entry for entry, count in Counter(entries).items() if count > 1]
    why = (
        f"; {', '.join(map(repr, odd))} is no number of a die: {LIST} has neither ranges nor spaces"
        if odd
        else f"; {', '.join(twice)} is there more than once"
        if twice
        else ""
    )
    if seen.listed < asked:
        return Check(
            LIST,
            FAILED,
            f"{seen.listed} entries: {seen.visible or repr('')}{why}",
            f"unset {LIST}    # in the shell, and where the container sets it\nor ask for fewer NPUs: "
            f"{_layouts(seen.listed, case)}",
        )
    first = [str(number) for number in range(asked)]
    if why or entries[:asked] != first:
        why = why or ": a worker gives Ray's number straight to set_device (base_worker.py:89)"
        return Check(LIST, FAILED, f"{seen.visible}{why}", f"export {LIST}={','.join(first)}")
    there = seen.cann if isinstance(seen.cann, int) else seen.davinci
    if beyond := [entry for entry in entries if int(entry) >= there > 0]:
        return Check(
            LIST,
            WARNING,
            f"{seen.visible}: there are {there} dies, from 0 on, and no {', '.join(beyond)}",
            f"export {LIST}={','.join(first)}",
        )
    return Check(LIST, PASSED, f"{seen.listed} entries")


def _container(machine: Machine, seen: Seen) -> Iterator[Check]:
    """The container runtime's list, in which ranges are allowed: it has chosen the device nodes,
    and CANN does not read it. Names of a cluster's (Ascend910-3) or none at all (void) are passed
    over.
    """
    given = machine.environment.get("ASCEND_VISIBLE_DEVICES", "")
    spans = [re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()) for part in given.split(",")]
    if not seen.mapped or not all(spans):
        return
    named = {
        number for span in spans for number in range(int(span[1]), int(span[2] or span[1]) + 1)
    }
    if named != set(seen.mapped):
        yield Check(
            "ASCEND_VISIBLE_DEVICES",
            WARNING,
            f"{given}, and {seen.davinci} dies are mapped: it is read by "
            f"the container's runtime when that starts, not by CANN, whose list is {LIST}",
            "unset ASCEND_VISIBLE_DEVICES",
        )


def _ray(seen: Seen, case: Case) -> Check:
    words = _words(seen, case)
    restart = (
        f'ray stop    # it stops every Ray of this user\nray start --head --resources=\'{{"NPU": '
        f"{case.npus_here}}}'"
    )
    if seen.ray is None:
        return _enough("Ray", seen.ray_would_count * case.nodes, case.npus, words)
    if isinstance(seen.ray, str):
        return Check(
            "Ray",
            FAILED,
            words,
            "unset RAY_ADDRESS    # then one is started for the run; or start the one that it names"
            if seen.address
            else restart,
        )
    count, nodes = _of_ray(seen), seen.ray["nodes"]
    if count >= case.npus > _free(seen):
        return Check(
            "Ray",
            FAILED,
            f"{words}: {case.npus} are asked for, and upstream would wait for them for ever",
            "Wait for that job or end it; a Ray of one's own would train on the same dies\nor ask for fewer "
            f"NPUs: {_layouts(_free(seen), case)}",
        )
    if count >= case.npus:
        return Check("Ray", PASSED, words)
    if count < seen.ray_would_count * nodes:
        why = (
            "; ".join(seen.stale)
            or "it was started with other --resources, or before the other NPUs were there"
        )
        return Check("Ray", FAILED, f"{words}. It is stale: {why}", restart)
    if nodes < case.nodes:
        return Check(
            "Ray",
            FAILED,
            f"{words}: {case.nodes - nodes} nodes are missing",
            "ray start --address=HEAD:PORT    # on each of them",
        )
    return Check("Ray", WARNING, words, f"After the fix above, start it once more:\n{restart}")


def _groups(seen: Seen, case: Case) -> Iterator[Check]:
    """Whether upstream's placement groups can be given where there is more than one node: what one
    node shows to CANN is the width of each.
    """
    rooms = seen.ray["npus"] if isinstance(seen.ray, Mapping) else [case.npus_here] * case.nodes
    if (
        len(rooms) < 2
        or not isinstance(seen.cann, int)
        or not seen.ray_would_count
        or sum(rooms) < case.npus
    ):
        return  # said above
    width = min(seen.ray_would_count, case.npus)
    if placed(width, case.npus, rooms):
        yield Check(
            "dies of a node",
            PASSED,
            f"each node shows {width} to CANN; Ray has {', '.join(map(str, rooms))}",
        )
        return
    yield Check(
        "dies of a node",
        FAILED,
        f"this node shows {seen.ray_would_count} to CANN, and upstream asks Ray for "
        f"groups of {width} on one node each (launcher.py:64-101); the nodes have "
        f"{', '.join(map(str, rooms))} for the run: it would wait for ever",
        f"export {LIST}="
        f"{','.join(map(str, range(case.npus_here)))}    # on every node, in the shell of the launcher",
    )


def _of_ray(seen: Seen) -> int:
    return int(seen.ray["resources"].get("NPU", 0))


def _free(seen: Seen) -> int:
    return int(seen.ray["available"].get("NPU", 0))


def _words(seen: Seen, case: Case) -> str:
    if seen.ray is None:
        which = "one of its own" if case.own_ray else "none is running; one"
        return f"{which} that is started now counts {seen.ray_would_count}"
    if isinstance(seen.ray, str):
        which = f"RAY_ADDRESS={seen.address}" if seen.address else "one is running and"
        return f"{which} cannot be joined: {seen.ray}"
    nodes = f" on {seen.ray['nodes']} nodes" if seen.ray["nodes"] > 1 or case.nodes > 1 else ""
    found = f"one is running with {_of_ray(seen)} NPUs{nodes}"
    if _free(seen) == _of_ray(seen):
        return found
    return f"{found}, of which {_free(seen)} are free; the others are {holders(seen.ray)}"


def _enough(name: str, count: int, asked: int, found: str) -> Check:
    """A part that has enough, or that has no fewer than the one before it: then that one is to be
    fixed.
    """
    if count >= asked:
        return Check(name, PASSED, found)
    return Check(name, WARNING, f"{found}: the others are lost above")


def _layouts(npus: int, case: Case) -> str:
    return f"python tools/plan_layout.py --ranks {npus} --model {quoted(case.recipe.model.path)}"
