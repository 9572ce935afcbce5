"""The host: CPUs, limits, memory, disk, ports."""

import itertools
import multiprocessing
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_qerl.ascend.cluster import lacking_cpus, placed
from mindspeed_qerl.ascend.limits import needed_cpus, npu_environment
from mindspeed_qerl.common.files import TRACKER
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import BF16, adapter_weights
from mindspeed_qerl.layout.weights import model_parameters, training_weights
from mindspeed_qerl.preflight.case import (
    FAILED,
    PASSED,
    SKIPPED,
    WARNING,
    Case,
    Check,
    gigabytes,
    needs,
    quoted,
)
from mindspeed_qerl.preflight.machine import Machine

OPEN_FILES = 32768  # MindSpeed-RL examples/grpo/*.sh
# bytes: with less in /dev/shm Ray keeps its objects on the disk
# (ray_constants.py:REQUIRE_SHM_SIZE_THRESHOLD)
OBJECT_STORE = 10**10
RAY_DISK, SOON = (
    0.05,
    0.02,
)  # part of the disk: Ray's 1 - local_fs_capacity_threshold; what a run may write besides
PROCESS = (
    4 * 10**9
    # bytes of a rank's process without weights: assumed for Python, torch, CANN, vLLM; never
    # measured
)
THREADS, THREADS_OF_A_CPU = (
    300,
    16,
)  # of a rank's process, and of Ray's for each CPU; never measured
CPUS_OF_A_DIE = 5  # vllm-ascend's own binding asks for as many (issue 6966)
PORTS = range(1024, 65536)
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}
RAY_PORT, WORKERS = 6380, range(20002, 30000)  # of the launcher's Ray (examples/grpo/launch.sh)
AGENT = range(
    52365, 52366
)  # Ray's dashboard agent (ray_constants.py:DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)
# ports that a run's workers take at most, of the first that Ray has for them
FEW = 1000


def cpus(machine: Machine, case: Case) -> Iterator[Check]:
    """CPUs that upstream reserves, against those that Ray has or would count."""
    if not case.upstream:
        yield Check("CPUs", PASSED, f"{machine.cpus()} here")
        return
    per_npu, need = case.recipe.npu.cpus_per_npu, needed_cpus(case.recipe)
    asks = f"{case.npus} NPUs x {per_npu} and Ray's other tasks reserve {need} logical CPUs"
    if not case.on_npus or case.own_ray:
        yield Check(
            "CPUs",
            PASSED,
            f"{asks}: places, not threads; the Ray that is started for the run is told to have "
            "them",
        )
        return
    if isinstance(case.seen.ray, str):
        yield Check("CPUs", SKIPPED, f"{asks}; Ray, above, cannot be asked")
        return
    if isinstance(case.seen.ray, Mapping):
        have, whose = int(case.seen.ray["available"].get("CPU", 0)), "the running Ray has free"
    else:
        have = machine.cpus() * case.nodes
        whose = "there are" if case.nodes == 1 else f"{case.nodes} nodes like this one have"
    if have >= need:
        lacking = _lacking_on_a_node(machine, case)
        yield Check(
            "CPUs",
            FAILED if lacking else PASSED,
            lacking or f"{asks}; {whose} {have}",
            lacking
            and f"ray start ... --num-cpus={need}    # on each node; they are places, not threads\n"
            "or lower rl_config.num_cpus_for_placement_group",
        )
        return
    most = (have - need + case.npus * per_npu) // case.npus
    fewer = (
        f"rl_config.num_cpus_for_placement_group={most}    # an override of the config\nor "
        if most >= 1
        else ""
    )
    yield Check(
        "CPUs",
        FAILED,
        f"{asks}; {whose} {have}: upstream would wait for ever",
        f"{fewer}ray start --head --num-cpus={need}    # they are places, not threads",
    )


def _lacking_on_a_node(machine: Machine, case: Case) -> str:
    """What the nodes together have and no node has; "" if nothing, or if the NPUs do not fit, which
    is said there.
    """
    if isinstance(case.seen.ray, Mapping):
        npus, cpus = case.seen.ray["npus"], case.seen.ray["cpus"]
    else:
        npus, cpus = [case.npus_here] * case.nodes, [machine.cpus()] * case.nodes
    width = min(case.seen.ray_would_count or case.npus_here, case.npus)
    return lacking_cpus(case.recipe, width, npus, cpus) if placed(width, case.npus, npus) else ""


def open_files(machine: Machine, case: Case) -> Iterator[Check]:
    limit = machine.open_files()
    if limit >= OPEN_FILES or not case.upstream:
        yield Check(
            "open files", PASSED, "no limit" if limit == sys.maxsize else f"ulimit -n is {limit:,}"
        )
    else:
        yield Check(
            "open files",
            WARNING,
            f"ulimit -n is {limit:,}; Ray's and HCCL's connections may need {OPEN_FILES:,}",
            f"ulimit -n {OPEN_FILES}    # in the shell that starts the run",
        )


def threads(machine: Machine, case: Case) -> Iterator[Check]:
    """Threads of ranks and of Ray's processes, whose gRPC has some for each CPU (verl issue 719,
    vllm issue 6295).
    """
    if not case.on_npus:
        return
    need = case.npus_here * THREADS + machine.cpus() * THREADS_OF_A_CPU
    by, most = min(machine.threads().items(), key=lambda each: each[1])
    found = (
        f"{by} = {most:,}; {case.npus_here} ranks and Ray on {machine.cpus()} CPUs may start "
        f"{need:,}, of {THREADS} a rank, which is assumed"
    )
    yield Check(
        "threads",
        PASSED if most >= need else WARNING,
        found,
        ""
        if most >= need
        else "Start the container with --pids-limit=-1 --ulimit nproc=65535; ulimit -u 65535    # else "
        '"pthread_create failed", or workers that never come',
    )


def cpuset(machine: Machine, case: Case) -> Iterator[Check]:
    """A shell under taskset or numactl, or a container with --cpuset-cpus (vllm-ascend issues 6966
    and 8600): torch_npu binds ranks to what is allowed (CPU_AFFINITY_CONF).
    """
    if not case.on_npus:
        return
    allowed, there, need = (
        machine.may_use(),
        multiprocessing.cpu_count(),
        CPUS_OF_A_DIE * case.npus_here,
    )
    narrow = allowed < min(there, need)
    yield Check(
        "CPUs to run on",
        WARNING if narrow else PASSED,
        f"{allowed} of {there}"
        + (
            f": {case.npus_here} ranks would share them, and vllm-ascend wants {CPUS_OF_A_DIE} for "
            "each"
            if narrow
            else ""
        ),
        "grep Cpus_allowed_list /proc/self/status    # leave out taskset or numactl, or the "
        "container's --cpuset-cpus"
        if narrow
        else "",
    )


def user(machine: Machine, case: Case) -> Iterator[Check]:
    """HCCL asks for the user's name (vllm-ascend issue 9490: error 19, and nothing else), and
    CANN's compiler writes kernel_meta into the folder that Ray was started in (issue 2748).
    """
    if not case.on_npus:
        return
    name = machine.user()
    if name is None:
        yield Check(
            "user and folder",
            WARNING,
            "the user of this process has no name in /etc/passwd: HCCL was seen "
            'to end with "HcclGetRootInfo ... error code is 19"',
            'echo "qerl:x:$(id -u):$(id -g)::$HOME:/bin/bash" >> /etc/passwd    # in the image, '
            "or as root",
        )
    elif not case.seen.any or machine.writable("."):
        yield Check("user and folder", PASSED, f"{name}, and this folder can be written")
    else:
        yield Check(
            "user and folder",
            WARNING,
            "this folder cannot be written: CANN's compiler writes kernel_meta "
            'into the one that Ray is started in ("Failed to init tbe")',
            "A checkout that can be written; or start Ray elsewhere, and join it (RAY_ADDRESS)",
        )


def shared_memory(machine: Machine, case: Case) -> Iterator[Check]:
    free = machine.disk_free("/dev/shm")
    if not case.on_npus or free >= OBJECT_STORE:
        yield Check("/dev/shm", PASSED, f"{gigabytes(free)} free for Ray's object store")
    else:
        yield Check(
            "/dev/shm",
            WARNING,
            f"{gigabytes(free)} free; below {gigabytes(OBJECT_STORE)} Ray keeps its objects on "
            "the disk",
            "Start the container with --shm-size=64g, or: mount -o remount,size=64G /dev/shm",
        )


def ray_disk(machine: Machine, case: Case) -> Iterator[Check]:
    """Ray judges the disk of its own folder by percent, however many GB are left (InternLM/lmdeploy
    issue 3457, ray-project/ray issue 36959 and pull request 25370).
    """
    if not case.upstream:
        return
    left, free = machine.disk_left("/tmp"), machine.disk_free("/tmp")
    found = f"{100 * left:.1f} % of its disk are free, {gigabytes(free)}"
    if left >= RAY_DISK + SOON:
        yield Check("/tmp", PASSED, f"{found}, for Ray's folder")
        return
    yield Check(
        "/tmp",
        FAILED if left < RAY_DISK else WARNING,
        f"{found}: below {100 * RAY_DISK:.0f} % Ray spills no "
        "object, and a run ends with OutOfDiskError",
        "du -xh -d 2 /tmp | sort -h | tail    # what fills it? Or another disk for it: -v DIR:/tmp",
    )


def disk(machine: Machine, case: Case) -> Iterator[Check]:
    """Room for the run's checkpoints and, while it is missing, for the converted base. Sizes are
    computed: 2 bytes a weight, and 12 of AdamW for each one that is trained, in every rank's file.
    """
    run, load, plan, task = case.recipe.run, case.recipe.model.load, case.plan, case.recipe.task
    if not machine.writable(run.root):
        yield Check(
            "run.root",
            FAILED,
            f"run.root = {run.root} cannot be written: the run directory is made in it",
            "run.root=DIR    # an override of the config",
        )
    for key, file in (
        ("task.test_file", task.test_file),
        ("megatron_training.data_path", f"{task.data_path}_packed_input_ids_document.bin"),
    ):
        if case.upstream and not Path(file).is_file() and not machine.writable(Path(file).parent):
            yield Check(
                "disk for the data",
                FAILED,
                f"{key} is not there, and {Path(file).parent}, into which it is "
                "converted, cannot be written",
                "export DATA=DIR    # where it can",
            )
            break
    base_is_made = case.upstream and load and not (Path(load) / TRACKER).is_file()
    if base_is_made and not machine.writable(load):
        yield Check(
            "disk for the base",
            FAILED,
            f"actor_config.load = {load} cannot be written: the base weights are converted into it",
            "actor_config.load=DIR    # an override of the config",
        )
    free = machine.disk_free(run.root)
    if not case.upstream:
        yield Check(
            "disk for the run",
            PASSED if free > 10**9 else WARNING,
            f"{gigabytes(free)} free for {run.root}",
            "" if free > 10**9 else f"df -h {quoted(run.root)}",
        )
        return
    if not case.legal:
        yield Check(
            "disk for the run",
            SKIPPED,
            f"{gigabytes(free)} free for {run.root}; no legal layout to compute the need of",
        )
        return
    stages, copies = range(plan.layout.pp), plan.layout.tp * plan.layout.ep
    base = trained = copies * sum(sum(training_weights(plan, stage)) for stage in stages)
    if plan.lora:
        settings = settings_of(case.recipe)
        trained = copies * sum(sum(adapter_weights(plan, settings, stage)) for stage in stages)
    yield _room(
        "disk for the run",
        run.root,
        free,
        (2 if case.recipe.npu.no_save_optim else 14) * trained,
        max(1, run.train_iters // (run.save_interval or run.train_iters)),
        f"run.root=DIR, or megatron_training.save_interval above {run.save_interval}    # "
        "overrides of the config",
    )
    if base_is_made and machine.writable(load):
        yield _room(
            "disk for the base",
            load,
            machine.disk_free(load),
            2 * base,
            1,
            "actor_config.load=DIR    # an override of the config",
        )


def _room(name: str, place: str, free: int, one: int, number: int, fix: str) -> Check:
    need = gigabytes(one * number) + (f" ({number} x {gigabytes(one)})" if number > 1 else "")
    state = PASSED if free >= one * number else WARNING if free >= one and number > 1 else FAILED
    return Check(
        name,
        state,
        f"about {need} needed, {gigabytes(free)} free for {place}",
        "" if state == PASSED else fix,
    )


@needs("on_npus", "ports", "no HCCL, and a Ray of the run's own on free ports")
def ports(machine: Machine, case: Case) -> Iterator[Check]:
    """The ports that the run is told to listen on, against those that are taken now, those that the
    kernel may draw, and each other. All others of a run are the kernel's draw: Ray's own,
    upstream's MASTER_PORT, its ZMQ server's.
    """
    theirs = _ports_of_ray(machine, case)
    try:
        ours = _ports_of_hccl(machine, case)
    except ValueError as error:
        variable = str(error).partition("=")[0]
        yield Check("ports of HCCL", FAILED, str(error), f"unset {variable}")
    else:
        yield _hccl(machine, case, *ours, theirs)
    yield _ray(machine, case, theirs)


def _ports_of_hccl(machine: Machine, case: Case) -> tuple[str, str, list[int]]:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on, by the number of its die
    (vllm-ascend pull request 12318), or somewhere in HCCL_HOST_SOCKET_PORT_RANGE: which variable,
    "12345-12360", and these ports. ValueError if there are no such ports.
    """
    shell = machine.environment
    given = shell.get("HCCL_HOST_SOCKET_PORT_RANGE", "").replace(" ", "")
    if given == "auto":
        return "HCCL_HOST_SOCKET_PORT_RANGE", given, []
    if given:
        spans = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part) for part in given.split(",")]
        found = [
            port
            for span in spans
            if span
            for port in range(int(span[1]), int(span[2] or span[1]) + 1)
        ]
        if not all(spans) or not found or min(found) < PORTS[0] or max(found) > PORTS[-1]:
            raise ValueError(
                f"HCCL_HOST_SOCKET_PORT_RANGE={given} must be auto, or ports and ranges of them, "
                f"such as 60000-60050, from {PORTS[0]} to {PORTS[-1]}"
            )
        if len(found) < case.npus_here:
            raise ValueError(
                f"HCCL_HOST_SOCKET_PORT_RANGE={given} has fewer ports than the {case.npus_here} "
                "ranks"
            )
        return "HCCL_HOST_SOCKET_PORT_RANGE", given, found
    dies = (
        case.seen.mapped[: case.npus_here],
        [die.number for die in case.seen.taken(case.npus_here)],
    )
    numbers = sorted({*range(case.npus_here), *dies[0], *dies[1]})
    text = shell.get("HCCL_IF_BASE_PORT") or npu_environment()["HCCL_IF_BASE_PORT"]
    base = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
    last = PORTS[-1] - numbers[-1]
    if not PORTS[0] <= base <= last:
        raise ValueError(
            f"HCCL_IF_BASE_PORT={text} must be a whole number from {PORTS[0]} to {last}: each of "
            f"the {case.npus_here} ranks has the next port"
        )
    return (
        "HCCL_IF_BASE_PORT",
        f"{base}-{base + numbers[-1]}",
        [base + number for number in numbers],
    )


def _ports_of_ray(machine: Machine, case: Case) -> dict[str, range]:
    """The ports that Ray is told to take: the launcher's, or the workers' of the one that runs
    here. What else that one has is taken already.
    """
    if case.own_ray:
        text = machine.environment.get("RAY_PORT") or str(RAY_PORT)
        port = (
            int(text) if re.fullmatch(r"\d{1,5}", text) else RAY_PORT
        )  # the launcher refuses others
        found = {
            f"Ray's head (RAY_PORT={port})": range(port, port + 1),
            "Ray's client server (RAY_PORT + 1)": range(port + 1, port + 2),
            "Ray's workers": WORKERS,
            "Ray's dashboard agent": AGENT,
        }
    else:
        found: dict[str, range] = {}
        for process in machine.processes("raylet"):
            words = machine.read(f"/proc/{process}/cmdline") or ""
            told = [re.search(rf"--{which}_worker_port=(\d+)", words) for which in ("min", "max")]
            if all(told) and (first := int(told[0][1])):  # 0: the kernel draws them
                found["the workers of the Ray that runs"] = range(
                    first, min(first + FEW, int(told[1][1]) + 1)
                )
    return found


def _hccl(
    machine: Machine,
    case: Case,
    variable: str,
    spans: str,
    ours: list[int],
    theirs: Mapping[str, range],
) -> Check:
    words = spans.replace("-", " to ").replace(",", " and ")
    fix = f"export {variable}=..., on every node    # other ports; or RAY_PORT"
    both = []
    for what, other in theirs.items():
        if common := [port for port in ours if port in other]:
            last = f" to {common[-1]}" if len(common) > 1 else ""
            both.append(f"{common[0]}{last} {'are' if last else 'is'} {what} too")
    if both:
        return Check(
            "ports of HCCL", FAILED if case.own_ray else WARNING, f"{words}: {'; '.join(both)}", fix
        )
    taken = [port for port in ours if not machine.port_free(port)]
    spare = 0 if variable == "HCCL_IF_BASE_PORT" else len(ours) - case.npus_here
    if len(taken) > max(spare, 0):
        return Check(
            "ports of HCCL",
            FAILED,
            f"{words}: {', '.join(map(str, taken))} taken",
            f"ss -ltnp '( sport >= :{ours[0]} and sport <= :{ours[-1]} )'    # whose?\nor {fix}",
        )
    if drawn := _drawn_ports(machine, ours):
        return Check(
            "ports of HCCL",
            WARNING,
            f"{words} are free, and inside net.ipv4.ip_local_port_range = {drawn}: "
            "any connection of this machine may draw one of them before HCCL listens",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={spans}",
        )
    return Check(
        "ports of HCCL", PASSED, f"{words} are free" if ours else "HCCL takes what is free"
    )


def _ray(machine: Machine, case: Case, theirs: Mapping[str, range]) -> Check:
    both = [
        f"{one} is among {other}, {second[0]} to {second[-1]}"
        if len(second) > 1
        else f"{one} is {other} too"
        for (one, first), (other, second) in itertools.combinations(theirs.items(), 2)
        if first[0] in second or second[0] in first
    ]
    if both:
        return Check(
            "ports of Ray",
            FAILED,
            "; ".join(both),
            "export RAY_PORT=N    # the first of two free ports, the same on every node",
        )
    if case.own_ray or machine.processes("raylet"):
        return Check(
            "ports of Ray",
            PASSED,
            "the launcher chooses them" if case.own_ray else "a Ray is running",
        )
    if taken := [
        f"{port} ({what})" for port, what in RAY_PORTS.items() if not machine.port_free(port)
    ]:
        return Check(
            "ports of Ray",
            WARNING,
            f"{', '.join(taken)} taken, and no Ray is running",
            "ray start --head --port=6380 --dashboard-port=8266    # the engine's own Ray takes "
            "free ones",
        )
    return Check("ports of Ray", PASSED, f"{', '.join(map(str, RAY_PORTS))} are free")


def _drawn_ports(machine: Machine, ports: list[int]) -> str:
    """net.ipv4.ip_local_port_range where the kernel may give a connection one of these ports, else
    "".
    """
    drawn = (machine.read("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    reserved = machine.read("/proc/sys/net/ipv4/ip_local_reserved_ports") or ""
    spans = [tuple(map(int, span.split("-"))) for span in re.findall(r"\d+(?:-\d+)?", reserved)]
    kept = {port for span in spans for port in range(span[0], span[-1] + 1)}
    if len(drawn) == 2 and any(int(drawn[0]) <= port <= int(drawn[1]) for port in {*ports} - kept):
        return "-".join(drawn)
    return ""


@needs("on_npus", "host memory", "no NPU is used")
def host_memory(machine: Machine, case: Case) -> Iterator[Check]:
    """What processes of this machine can still have, against what its ranks load at once and the
    conversion of the base weights. Every rank reads its whole file before its weights go to the die
    (megatron/training/checkpointing.py, torch.load); what is trained, its gradients and optimizer
    state are offloaded to the host while vLLM runs.
    """
    room = machine.memory()
    if not case.legal or not room:
        yield Check(
            "host memory",
            SKIPPED,
            "cannot be read here" if case.legal else "no legal layout to compute the need of",
        )
        return
    plan, here, load = case.plan, case.npus_here, case.recipe.model.load
    by, free = min(room.items(), key=lambda each: each[1])
    stages = range(plan.layout.pp)
    files = (
        BF16 * sum(sum(training_weights(plan, stage)) for stage in stages) * here // plan.layout.pp
        if load
        else 0
    )
    held = estimate(plan, settings_of(case.recipe)).moments["update"]
    kinds = (
        ("adapters and optimizer",) if plan.lora else ("adapters and optimizer", "training weights")
    )
    offloaded = here * sum(part.bytes for part in held if part.kind in kinds)
    yield _enough_memory("host memory", files, offloaded, here, by, free)
    if load and not (Path(load) / TRACKER).is_file():
        weights = BF16 * model_parameters(plan.shape) // plan.layout.pp
        state = FAILED if free < weights else WARNING if free < 2 * weights else PASSED
        yield Check(
            "memory to convert",
            state,
            f"the converter holds {gigabytes(weights)} of weights, and up to as "
            "much again in their new form (convert_hf2mg.py, one pipeline stage at a time); "
            f"{gigabytes(free)} are left ({by})",
            ""
            if state == PASSED
            else f"Convert on a machine with more memory, and copy {load} here",
        )


def _enough_memory(name: str, files: int, offloaded: int, here: int, by: str, free: int) -> Check:
    """Sizes in bytes, of all `here` ranks of this machine; `by` limits what is free."""
    least = max(files, offloaded)
    need = least + here * PROCESS
    found = (
        f"{here} ranks load {gigabytes(files)} of base weights at once, later "
        f"{gigabytes(offloaded)} are offloaded here; with {gigabytes(PROCESS)} assumed for each "
        f"process about {gigabytes(need)}. {gigabytes(free)} are left ({by})"
    )
    if free >= need:
        return Check(name, PASSED, found)
    fix = (
        "Raise the container's --memory, or end what holds the memory (ps -eo pid,rss,args --sort "
        "-rss | head)\nor fewer ranks on this machine: python tools/plan_layout.py --ranks N"
    )
    return Check(name, FAILED if free < least else WARNING, found, fix)


def panic_on_oom(machine: Machine, case: Case) -> Iterator[Check]:
    value = (machine.read("/proc/sys/vm/panic_on_oom") or "").strip()
    if not value:
        yield Check("vm.panic_on_oom", SKIPPED, "cannot be read here")
    elif value == "0":
        yield Check(
            "vm.panic_on_oom",
            PASSED,
            "0: a process that takes too much host memory is killed, the machine stays",
        )
    else:
        yield Check(
            "vm.panic_on_oom",
            WARNING,
            f"{value}: the whole machine reboots when host memory runs out",
            "sysctl -w vm.panic_on_oom=0",
        )


@needs("on_npus", "jemalloc", "for NPU workers only")
def jemalloc(machine: Machine, case: Case) -> Iterator[Check]:
    preloaded = [
        path
        for path in re.split(r"[\s:]+", machine.environment.get("LD_PRELOAD", ""))
        if "jemalloc" in path
    ]
    there = machine.glob("/usr/lib/*/libjemalloc.so.2") + machine.glob("/usr/lib*/libjemalloc.so.2")
    install = "apt install libjemalloc2 && export LD_PRELOAD=$(ls /usr/lib/*/libjemalloc.so.2)"
    fix = f"export LD_PRELOAD={quoted(there[0])}" if there else install
    if not preloaded:
        yield Check(
            "jemalloc",
            WARNING,
            "not in LD_PRELOAD; the workers' host memory fragments without it",
            fix,
        )
    elif not machine.glob(preloaded[0]):
        yield Check(
            "jemalloc", WARNING, f"LD_PRELOAD names {preloaded[0]}, which is not there", fix
        )
    else:
        yield Check("jemalloc", PASSED, preloaded[0])
