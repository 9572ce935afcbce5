"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses
some.
"""

from collections.abc import Iterable

from mindspeed_qerl.ascend.cluster import holders, placed
from mindspeed_qerl.ascend.imports import DRIVER, way_out
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.preflight.asking import LIST
from mindspeed_qerl.preflight.case import (
    FAILED,
    Case,
    Check,
    Die,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)
from mindspeed_qerl.preflight.machine import Machine, ProbeError

MIB = 2**20
# What a die that nobody uses shows, and some: of 64 GB public reports have 2.7 to 3.5 GB.
IDLE = 1 / 8
# Why npu-smi lists nothing -> what to do
SMI_FIXES = {
    "timeout": "ps -eo pid,stat,args | grep npu-smi    # in state D it hangs inside the driver, as "
    "a run would\ndmesg | grep -i -E 'davinci|hisi|drv' | tail    # on the host; then a reset or "
    "reboot by its owner",
    "missing": "Map /usr/local/bin/npu-smi and /usr/local/dcmi into the container",
    "library": DRIVER,
    "failed": "On the host: npu-smi info. If it answers there, map davinci_manager, devmm_svm, "
    "hisi_hdc, /usr/local/dcmi\nand /usr/local/Ascend/driver into the container; "
    '"device is used" is another container with the same dies',
}


def ranks(machine: Machine, case: Case) -> Check:
    """The number of each part, and which of them lose some."""
    seen = case.seen
    if not case.on_npus:
        why = "emulate_npu=true" if case.upstream else f"engine={case.recipe.engine}"
        return skipped(f"{why} needs no NPU; what NPUs need is left out")
    if not case.npus_here:
        return failed(
            f"{case.npus} NPUs are asked for, this machine has none; all else is checked "
            f"({seen.smi_fault}; no /dev/davinci*; CANN: {seen.cann})",
            f"Rehearse it here: python cli/train_grpo.py --config-name {case.name} engine=local "
            "rehearsal.enabled=true",
        )
    counts = {"/dev/davinci*": seen.davinci, "CANN": seen.acl, LIST: seen.listed}
    if seen.dies:
        counts = {"npu-smi": sum(not die.sick for die in seen.dies), **counts}
    if seen.cluster:
        counts["Ray"] = seen.npus_of_ray("available")
    numbers = [f"{name} {count}" for name, count in counts.items() if count is not None]
    words = f"{case.ranks} asked for here; {', '.join(numbers)}"
    lost = []
    for name, part in PARTS.items():
        check = part(machine, case)
        if check and check.state == FAILED and not case.accepts(name):
            lost.append(name)
    if lost:
        return failed(f"{words}. Lost at {', '.join(lost)}")
    return passed(words)


def npu_smi(machine: Machine, case: Case) -> Check:
    seen, wanted = case.seen, case.ranks
    if not seen.dies:
        words = f"{seen.smi_fault}; health and memory of the dies are not known"
        assert seen.smi_fault, "why there are no dies"
        reason = "library" if "shared librar" in words else seen.smi_fault.reason
        verdict = failed if reason == "timeout" else warning
        return verdict(words, SMI_FIXES[reason])
    words, taken = f"{len(seen.dies)} dies", seen.taken(wanted)
    sick = [die for die in seen.dies if not die.healthy]
    if sick:
        words += f", not healthy: {_first(f'{_name(die)}: {die.health}' for die in sick)}"
    faulty = [f"davinci{die.number}" for die in taken if die.sick]
    if faulty:
        return failed(
            f"{words}; the run would use {', '.join(faulty)}, of the first {wanted} that are mapped"
        )
    if len(seen.dies) < wanted:
        return failed(words)
    busy = [die for die in taken if die.total and die.used > die.total * IDLE]
    if busy:
        return _busy(busy, words, case)
    if any(not die.healthy for die in taken):
        return warning(f"{words}: a minor alarm, or an unknown word")
    if seen.held is None or any(not die.total for die in seen.dies):
        return warning(f"{words}; it prints no memory, or no processes")
    return passed(f"{words}; the first {wanted} that are mapped are healthy and free")


def _busy(busy: list[Die], words: str, case: Case) -> Check:
    """Memory that somebody holds on dies that the run takes, against the plan's."""
    names = _first(f"{_name(die)} ({die.used:,} of {die.total:,} MB)" for die in busy)
    words += f"; memory in use on {len(busy)}: {names}"
    legal = case.legal
    if legal is None:
        return warning(words)
    plan = estimate(legal, settings_of(case.recipe))
    used, left = (
        max(MIB * die.used for die in busy),
        min(MIB * (die.total - die.used) for die in busy),
    )
    # vLLM counts what others hold as used by itself (vllm-ascend worker_v1.py:241-248)
    cache, answer = plan.kv_cache - used, plan.kv_token * legal.batch.max_model_len
    words += f". The plan needs {gigabytes(plan.peak)} of the {gigabytes(left)} that are left, and "
    words += f"{gigabytes(cache)} of its {gigabytes(plan.kv_cache)} of KV cache would be left"
    if plan.peak > left or cache < answer:
        return failed(words)
    return warning(words)


def processes(machine: Machine, case: Case) -> Check | None:
    """Processes on dies that the run takes, however little they hold: HCCL listens on one port of a
    die's own network interface (vllm-ascend issues 1955, 4725 and 11968).
    """
    held = case.seen.held or {}
    dies = [die.number for die in case.seen.taken(case.ranks) if die.number in held]
    if not dies:
        return None
    words = _first(f"davinci{number}: {', '.join(held[number])}" for number in dies)
    return warning(
        f"{words}. If one of them uses HCCL, this run cannot listen on the die's port "
        '("specific port[16666] fail")'
    )


def davinci(machine: Machine, case: Case) -> Check:
    seen, words = case.seen, f"{case.seen.davinci} device nodes"
    if seen.closed:
        return failed(f"{words}, and {_first(seen.closed)}")
    if seen.davinci < min(case.ranks, len(seen.dies) or case.ranks):
        return failed(f"{words}: the container maps fewer than the machine has")
    return _enough(seen.davinci, case.ranks, words)


def cann(machine: Machine, case: Case) -> Check:
    seen = case.seen
    if isinstance(seen.cann, ProbeError):
        words = str(seen.cann)
        return failed(words, way_out(words) if "shared object" in words else "")
    if seen.cann < min(case.ranks, seen.davinci):
        return failed(
            f"{seen.cann} of the {seen.davinci} devices come up: a faulty die, or one that another "
            "container holds"
        )
    return _enough(seen.cann, case.ranks, f"acl counts {seen.cann}")


def visible(machine: Machine, case: Case) -> Check:
    """Dies by the list of the shell. A worker gives Ray's number straight to set_device
    (base_worker.py:89), so that only the first dies can be used; CANN's list has neither ranges nor
    spaces.
    """
    seen = case.seen
    if seen.visible is None or seen.listed is None:
        return passed("not set: all are visible")
    entries, first = seen.visible.split(","), list(map(str, range(case.ranks)))
    words = f"{seen.listed} entries: {seen.visible or repr('')}"
    if seen.listed < case.ranks:
        return failed(words)
    odd = [entry for entry in entries if not entry.isdecimal() or entries.count(entry) > 1]
    fix = f"export {LIST}={','.join(first)}"
    if odd:
        return failed(f"{words}; {', '.join(map(repr, odd))} must be numbers, each once", fix)
    if entries[: case.ranks] != first:
        why = "a worker gives Ray's number straight to set_device (base_worker.py:89)"
        return failed(f"{words}; {why}", fix)
    there = seen.acl or seen.davinci
    if max(map(int, entries)) >= there:
        return warning(f"{words}; there are {there} dies, from 0 on", fix)
    return passed(f"{seen.listed} entries")


def ray(machine: Machine, case: Case) -> Check:
    seen = case.seen
    if seen.ray is None:
        which = "one of its own" if case.own_ray else "none is running; one"
        words = f"{which} that is started now counts {seen.ray_would_count}"
        return _enough(seen.ray_would_count * case.nodes, case.npus, words)
    if isinstance(seen.ray, ProbeError):
        which = f"RAY_ADDRESS={seen.address}" if seen.address else "one is running and"
        return failed(f"{which} cannot be joined: {seen.ray}")
    count, free, nodes = (
        seen.npus_of_ray("resources"),
        seen.npus_of_ray("available"),
        seen.ray["nodes"],
    )
    words = f"one is running with {count} NPUs on {nodes} nodes"
    if free < count:
        words += f", of which {free} are free; the others are {holders(seen.ray)}"
    if count >= case.npus > free:
        return failed(f"{words}: upstream would wait for {case.npus} for ever")
    if count >= case.npus:
        return passed(words)
    if count < seen.ray_would_count * nodes:
        other = "it was started with other --resources, or before the other NPUs were there"
        return failed(f"{words}. It is stale: {'; '.join(seen.stale) or other}")
    if nodes < case.nodes:
        return failed(f"{words}: {case.nodes - nodes} nodes are missing")
    return _enough(count, case.npus, words)


def groups(machine: Machine, case: Case) -> Check | None:
    """Whether upstream's placement groups can be given where there is more than one node: what one
    node shows to CANN is the width of each.
    """
    seen = case.seen
    rooms = seen.cluster["npus"] if seen.cluster else [case.ranks] * case.nodes
    if len(rooms) < 2 or seen.acl is None or not seen.ray_would_count or sum(rooms) < case.npus:
        return None  # said above
    width, sizes = min(seen.ray_would_count, case.npus), ", ".join(map(str, rooms))
    if placed(width, case.npus, rooms):
        return passed(f"each node shows {width} to CANN; Ray has {sizes}")
    return failed(
        f"this node shows {seen.ray_would_count} to CANN, and upstream asks Ray for groups of "
        f"{width} on one node each (launcher.py:64-101); the nodes have {sizes} for the run: it "
        "would wait for ever",
        f"export {LIST}={','.join(map(str, range(case.ranks)))}    # on every node, in the shell "
        "of the launcher",
    )


# What `ranks` sums up: each part from the hardware up to Ray.
PARTS = {
    "npu-smi": npu_smi,
    "/dev/davinci*": davinci,
    "CANN": cann,
    LIST: visible,
    "Ray": ray,
    "dies of a node": groups,
}


def _enough(count: int, wanted: int, words: str) -> Check:
    """A part that has enough, or no fewer than the one before it: then that one is to be fixed."""
    if count >= wanted:
        return passed(words)
    return warning(f"{words}: the others are lost above", "First what is lost above")


def _name(die: Die) -> str:
    return f"NPU {die.card} chip {die.chip}"


def _first(words: Iterable[str]) -> str:
    """The first four, and how many more."""
    words = list(words)
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return "; ".join(words[:4]) + more
