"""How many NPUs each part of the machine sees, from the hardware up to Ray, and which part loses
some.
"""

from collections.abc import Iterable
from functools import partial

from mindspeed_qerl.ascend.cluster import holders, placed
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.preflight.case import (
    LIST,
    Case,
    Check,
    Question,
    enough,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)

# What a die that nobody uses shows, and some: of 64 GB public reports have 2.7 to 3.5 GB.
IDLE = 1 / 8


def ranks(case: Case) -> Check:
    """The number of each part, and the first of them that loses some."""
    if not case.on_npus:
        return skipped(f"engine={case.recipe.engine}, emulate_npu={case.recipe.emulate_npu}")
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
        verdict = failed if fault.late else warning
        return verdict(f"{fault}; health and memory of the dies are not known")
    taken = seen.taken(wanted)
    words = f"{len(seen.dies)} dies"
    sick = [f"davinci{die.number}: {die.health}" for die in taken if die.sick]
    if sick:
        words += f"; of the first {wanted}, which the run uses, {_first(sick)}"
    if sick or len(seen.dies) < wanted:
        return failed(words)
    busy = [die for die in taken if die.used > die.total * IDLE]
    if not busy:
        return passed(f"{words}; the first {wanted} that are mapped are healthy and free")
    held = _first(f"davinci{die.number} ({die.used:,} of {die.total:,} MB)" for die in busy)
    words += f"; in use: {held}"
    if case.legal is None:
        return warning(words)
    left = 2**20 * min(die.total - die.used for die in busy)
    need = estimate(case.legal, settings_of(case.recipe)).peak
    words += f". The plan needs {gigabytes(need)} of the {gigabytes(left)} that are left"
    return enough(left, need, float("inf"), words)


def processes(case: Case) -> Check | None:
    """Processes on dies that the run takes, however little they hold: HCCL listens on one port of a
    die's own network interface (vllm-ascend issues 1955, 4725 and 11968).
    """
    held = []
    for die in case.seen.taken(case.ranks):
        for words in case.seen.processes.get(die.number, ()):
            held.append(f"davinci{die.number}: {words}")
    if not held:
        return None
    return warning(
        f"{_first(held)}. If one of them uses HCCL, this run cannot listen on the die's port "
        '("specific port[16666] fail")'
    )


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


def groups(case: Case) -> Check | None:
    """Checks whether upstream's placement groups can be given where there is more than one node:
    what one node shows to CANN is the width of each.
    """
    rooms = [case.ranks] * case.nodes
    if case.seen.ray:
        rooms = case.seen.ray["npus"]
    width = min(case.seen.ray_would_count, case.npus)
    if len(rooms) < 2 or not width or sum(rooms) < case.npus or placed(width, case.npus, rooms):
        return None
    return failed(
        f"this node shows {width} to CANN, and upstream asks Ray for groups of as many on one node "
        f"each (launcher.py:64-101); the nodes have {', '.join(map(str, rooms))} for the run: it "
        "would wait for ever",
        f"export {LIST}={','.join(map(str, range(case.ranks)))}    # on every node, in the shell "
        "of the launcher",
    )


def _first(words: Iterable[str]) -> str:
    """The first four, and how many more."""
    words = list(words)
    if len(words) > 4:
        words[4:] = [f"{len(words) - 4} more"]
    return "; ".join(words)


ROWS = [
    Question(
        "ranks",
        "Has this machine the NPUs that the config asks for, by every part that counts them?",
        ranks,
        "See the part that loses some",
        refused=True,
    ),
    Question(
        "npu-smi",
        "Does npu-smi list enough dies, healthy and with free memory?",
        npu_smi,
        "npu-smi info    # here and on the host; processes are at its end: stop those that "
        'are yours and left over. "device is used" is another container\n'
        "ps -eo pid,stat,args | grep npu-smi    # no answer, in state D: it hangs inside the "
        "driver, as a run would; a reset or reboot by the host's owner\n"
        "Map /usr/local/bin/npu-smi, /usr/local/dcmi and /usr/local/Ascend/driver into the "
        "container; export "
        "LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver"
        ":$LD_LIBRARY_PATH\n"
        "A faulty or missing die is a case for the vendor; until then start the container "
        "with others (--device=/dev/davinciN), or ask for fewer NPUs",
        "npus_here",
    ),
    Question(
        "processes on the dies",
        "Are the dies free of processes of others?",
        processes,
        "ps -o pid,ppid,user,args -p PID    # on the host; end what is yours, or start a "
        "container with other dies, without --privileged",
        "npus_here",
    ),
    Question(
        "/dev/davinci*",
        "Does the container map enough device nodes that can be opened?",
        partial(count, name="/dev/davinci*"),
        "Start the container with --device=/dev/davinciN of each die, "
        "--device=/dev/davinci_manager --device=/dev/devmm_svm --device=/dev/hisi_hdc,\n"
        "and as root with --cap-add DAC_OVERRIDE, or with --group-add and the group of the "
        "nodes (ls -ln /dev/davinci*)",
        "npus_here",
    ),
    Question(
        "CANN",
        "Does acl count as many dies as are mapped?",
        partial(count, name="CANN"),
        "npu-smi info    # a die that is not OK, or that a process of another container has\n"
        "grep -rh ERROR ~/ascend/log/debug/plog | tail    # CANN's own words; "
        "ASCEND_PROCESS_LOG_PATH moves it\n"
        "No module named 'acl': export "
        "PYTHONPATH=$PYTHONPATH:$ASCEND_HOME_PATH/python/site-packages\n"
        "or ask for fewer NPUs: python tools/plan_layout.py --ranks N",
        "npus_here",
    ),
    Question(
        "ASCEND_RT_VISIBLE_DEVICES",
        "Does it name the first dies, each once, and all that are needed?",
        visible,
        "unset ASCEND_RT_VISIBLE_DEVICES",
        "npus_here",
    ),
    Question(
        "Ray",
        "Has the running Ray, or would a new one have, enough free NPUs?",
        ray,
        "unset RAY_ADDRESS; ray stop    # it stops every Ray of this user; the run starts "
        "its own\n"
        "or ask for fewer NPUs: python tools/plan_layout.py --ranks N",
        "npus_here",
    ),
    Question(
        "dies of a node",
        "Has a node as many dies as upstream asks for in one placement group?",
        groups,
        "",
        "npus_here",
    ),
]
