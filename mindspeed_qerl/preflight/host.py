"""The host: CPUs, limits, memory, disk, ports, and where CANN is."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindspeed_qerl.ascend.settings import needed_cpus, npu_environment
from mindspeed_qerl.emulation import CANN_VERSIONS
from mindspeed_qerl.files import TRACKER
from mindspeed_qerl.layout.memory import adapter_weights, settings_of, training_weights
from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check, gigabytes, needs
from mindspeed_qerl.preflight.machine import Machine

OPEN_FILES = 32768  # MindSpeed-RL examples/grpo/*.sh
# bytes: with less in /dev/shm Ray keeps its objects on the disk (ray_constants.py:REQUIRE_SHM_SIZE_THRESHOLD)
OBJECT_STORE = 10**10
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}


def cpus(machine: Machine, case: Case) -> Iterator[Check]:
    """CPUs that upstream reserves, against those that Ray has or would count."""
    if not case.upstream:
        yield Check("CPUs", PASSED, f"{machine.cpus()} here")
        return
    per_npu, need = case.recipe.npu.cpus_per_npu, needed_cpus(case.recipe)
    asks = f"{case.npus} NPUs x {per_npu} and Ray's other tasks reserve {need} logical CPUs"
    if not case.on_npus or case.own_ray:
        yield Check("CPUs", PASSED,
                    f"{asks}: places, not threads; the Ray that is started for the run is told to have them")
        return
    if isinstance(case.seen.ray, Mapping):
        have, whose = int(case.seen.ray["resources"].get("CPU", 0)), "the running Ray has"
    else:
        have = machine.cpus() * case.nodes
        whose = "there are" if case.nodes == 1 else f"{case.nodes} nodes like this one have"
    if have >= need:
        yield Check("CPUs", PASSED, f"{asks}; {whose} {have}")
        return
    most = (have - need + case.npus * per_npu) // case.npus
    fewer = f"rl_config.num_cpus_for_placement_group={most}    # an override of the config\nor " if most >= 1 else ""
    yield Check("CPUs", FAILED, f"{asks}; {whose} {have}: upstream would wait for ever",
                f"{fewer}ray start --head --num-cpus={need}    # they are places, not threads")


def open_files(machine: Machine, case: Case) -> Iterator[Check]:
    limit = machine.open_files()
    if limit >= OPEN_FILES or not case.upstream:
        yield Check("open files", PASSED, "no limit" if limit == sys.maxsize else f"ulimit -n is {limit:,}")
    else:
        yield Check("open files", WARNING, f"ulimit -n is {limit:,}; Ray's and HCCL's connections may need "
                    f"{OPEN_FILES:,}", f"ulimit -n {OPEN_FILES}    # in the shell that starts the run")


def shared_memory(machine: Machine, case: Case) -> Iterator[Check]:
    free = machine.disk_free("/dev/shm")
    if not case.on_npus or free >= OBJECT_STORE:
        yield Check("/dev/shm", PASSED, f"{gigabytes(free)} free for Ray's object store")
    else:
        yield Check("/dev/shm", WARNING,
                    f"{gigabytes(free)} free; below {gigabytes(OBJECT_STORE)} Ray keeps its objects on the disk",
                    "Start the container with --shm-size=64g, or: mount -o remount,size=64G /dev/shm")


def disk(machine: Machine, case: Case) -> Iterator[Check]:
    """Room for the run's checkpoints and, while it is missing, for the converted base. Sizes are computed: 2 bytes a
    weight, and 12 of AdamW for each one that is trained, in every rank's file."""
    run, load, plan = case.recipe.run, case.recipe.model.load, case.plan
    free = machine.disk_free(run.root)
    if not case.upstream:
        yield Check("disk for the run", PASSED if free > 10**9 else WARNING, f"{gigabytes(free)} free for {run.root}",
                    "" if free > 10**9 else f"df -h {run.root}")
        return
    if not case.legal:
        yield Check("disk for the run", SKIPPED,
                    f"{gigabytes(free)} free for {run.root}; no legal layout to compute the need of")
        return
    stages, copies = range(plan.layout.pp), plan.layout.tp * plan.layout.ep
    base = trained = copies * sum(sum(training_weights(plan, stage)) for stage in stages)
    if plan.lora:
        settings = settings_of(case.recipe)
        trained = copies * sum(sum(adapter_weights(plan, settings, stage)) for stage in stages)
    yield _room("disk for the run", run.root, free, (2 if case.recipe.npu.no_save_optim else 14) * trained,
                max(1, run.train_iters // (run.save_interval or run.train_iters)),
                f"run.root=DIR, or megatron_training.save_interval above {run.save_interval}    # overrides of the "
                "config")
    if load and not (Path(load) / TRACKER).is_file():
        yield _room("disk for the base", load, machine.disk_free(load), 2 * base, 1,
                    "actor_config.load=DIR    # an override of the config")


def _room(name: str, place: str, free: int, one: int, number: int, fix: str) -> Check:
    need = gigabytes(one * number) + (f" ({number} x {gigabytes(one)})" if number > 1 else "")
    state = PASSED if free >= one * number else WARNING if free >= one and number > 1 else FAILED
    return Check(name, state, f"about {need} needed, {gigabytes(free)} free for {place}",
                 "" if state == PASSED else fix)


@needs("on_npus", "ports", "no HCCL, and a Ray of the run's own on free ports")
def ports(machine: Machine, case: Case) -> Iterator[Check]:
    """HCCL listens on one port a rank from HCCL_IF_BASE_PORT on; Ray's head and dashboard have fixed ones."""
    base = int(machine.environment.get("HCCL_IF_BASE_PORT") or npu_environment()["HCCL_IF_BASE_PORT"])
    last = base + case.npus_here - 1
    if taken := [str(port) for port in range(base, last + 1) if not machine.port_free(port)]:
        yield Check("ports of HCCL", FAILED, f"{base} to {last}: {', '.join(taken)} taken",
                    f"ss -ltnp '( sport >= :{base} and sport <= :{last} )'    # whose?\nor export "
                    "HCCL_IF_BASE_PORT=N, on every node")
    else:
        yield Check("ports of HCCL", PASSED, f"{base} to {last} are free")
    if case.own_ray or machine.processes("raylet"):
        yield Check("ports of Ray", PASSED, "the launcher chooses them" if case.own_ray else "a Ray is running")
    elif taken := [f"{port} ({what})" for port, what in RAY_PORTS.items() if not machine.port_free(port)]:
        yield Check("ports of Ray", WARNING, f"{', '.join(taken)} taken, and no Ray is running",
                    "ray start --head --port=6380 --dashboard-port=8266    # the engine's own Ray takes free ones")
    else:
        yield Check("ports of Ray", PASSED, f"{', '.join(map(str, RAY_PORTS))} are free")


def panic_on_oom(machine: Machine, case: Case) -> Iterator[Check]:
    value = (machine.read("/proc/sys/vm/panic_on_oom") or "").strip()
    if not value:
        yield Check("vm.panic_on_oom", SKIPPED, "cannot be read here")
    elif value == "0":
        yield Check("vm.panic_on_oom", PASSED,
                    "0: a process that takes too much host memory is killed, the machine stays")
    else:
        yield Check("vm.panic_on_oom", WARNING, f"{value}: the whole machine reboots when host memory runs out",
                    "sysctl -w vm.panic_on_oom=0")


@needs("on_npus", "jemalloc", "for NPU workers only")
def jemalloc(machine: Machine, case: Case) -> Iterator[Check]:
    preloaded = [path for path in re.split(r"[\s:]+", machine.environment.get("LD_PRELOAD", "")) if "jemalloc" in path]
    there = machine.glob("/usr/lib/*/libjemalloc.so.2") + machine.glob("/usr/lib*/libjemalloc.so.2")
    install = "apt install libjemalloc2 && export LD_PRELOAD=$(ls /usr/lib/*/libjemalloc.so.2)"
    fix = f"export LD_PRELOAD={there[0]}" if there else install
    if not preloaded:
        yield Check("jemalloc", WARNING, "not in LD_PRELOAD; the workers' host memory fragments without it", fix)
    elif not machine.glob(preloaded[0]):
        yield Check("jemalloc", WARNING, f"LD_PRELOAD names {preloaded[0]}, which is not there", fix)
    else:
        yield Check("jemalloc", PASSED, preloaded[0])


@needs("on_npus", "CANN's paths", "no NPU is used")
def cann(machine: Machine, case: Case) -> Iterator[Check]:
    """CANN's environment: its root, and its Python packages on the path."""
    home, acl = machine.environment.get("ASCEND_HOME_PATH"), machine.importable("acl")
    if not (home or acl or case.seen.any):
        yield Check("CANN's paths", SKIPPED, "no NPU here, and no CANN")
    elif not home:
        yield Check("CANN's paths", FAILED, "ASCEND_HOME_PATH is not set: set_env.sh was not sourced",
                    "source /usr/local/Ascend/cann/set_env.sh && source /usr/local/Ascend/nnal/atb/set_env.sh")
    elif not acl:
        yield Check("CANN's paths", FAILED, "the module acl is not on PYTHONPATH; was it replaced, not added to?",
                    f"export PYTHONPATH=$PYTHONPATH:{home}/python/site-packages")
    else:
        yield Check("CANN's paths", PASSED, f"ASCEND_HOME_PATH={home}, acl is importable")
        yield cann_version(machine, home)


def cann_version(machine: Machine, home: str) -> Check:
    """What torch.version.cann will say, where torch_npu reads it (utils/collect_env.py:71): vllm-ascend chooses code
    by it."""
    files = machine.glob(f"{home}/ascend_*_install.info") + machine.glob(f"{home}/*/ascend_*_install.info")
    texts = [machine.read(file) or "" for file in files]
    found = next((match[1] for text in texts if (match := re.search(r"^version=(\S+)", text, re.MULTILINE))), None)
    tested = " and ".join(CANN_VERSIONS)
    if found in CANN_VERSIONS:
        return Check("CANN's version", PASSED, f"{found}, one that vllm-ascend was run for on emulated NPUs")
    return Check("CANN's version", WARNING,
                 f"{found or 'not in any ascend_*_install.info below ASCEND_HOME_PATH'}; vllm-ascend was run for "
                 f"{tested} on emulated NPUs, and chooses code by this version",
                 f"docs/ascend.md, Install: CANN {CANN_VERSIONS[0]}")
