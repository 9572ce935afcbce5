"""The host: CPUs, limits, memory, disks."""

import multiprocessing
import re
from collections.abc import Callable

from mindspeed_qerl.ascend.cluster import lacking_cpus, placed
from mindspeed_qerl.ascend.limits import needed_cpus
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import BF16, Settings, adapter_weights
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.weights import model_parameters, training_weights
from mindspeed_qerl.preflight.case import (
    Case,
    Check,
    enough,
    failed,
    gigabytes,
    passed,
    skipped,
    warning,
)
from mindspeed_qerl.preflight.machine import Machine, ProbeError

# bytes of a rank's process without weights: assumed for Python, torch, CANN, vLLM; never measured
PROCESS = 4 * 10**9
# of a rank's process, and of Ray's for each CPU; never measured
THREADS, THREADS_OF_A_CPU = 300, 16
ADAMW = 12  # bytes a trained weight: fp32 itself and both moments
CPUS_OF_A_DIE = 5  # vllm-ascend's own binding asks for as many (issue 6966)


def at_least(
    machine: Machine,
    case: Case,
    name: str,
    measure: str,
    need: float,
    words: str,
    least: float = 0,
    path: str = "",
) -> Check:
    """A number of the machine, a method of `Machine`, against what a run needs."""
    have = getattr(machine, measure)(*filter(None, [path]))
    return enough(have, least, need, words.format(have, need))


def cpuset(machine: Machine, case: Case) -> Check:
    allowed, there = machine.may_use(), multiprocessing.cpu_count()
    words = f"{allowed} of {there}, and vllm-ascend wants {CPUS_OF_A_DIE} for each rank"
    return enough(allowed, 0, min(there, CPUS_OF_A_DIE * case.ranks), words)


def cpus(machine: Machine, case: Case) -> Check:
    """CPUs that upstream reserves, against those that Ray has or would count, all and on a node."""
    recipe, need = case.recipe, needed_cpus(case.recipe)
    words = f"{case.npus} NPUs x {recipe.npu.cpus_per_npu} and Ray's other tasks reserve {need}"
    words += " logical CPUs"
    if not case.on_npus or case.own_ray:
        return passed(f"{words}: places, not threads; the Ray of the run is told to have them")
    if isinstance(case.seen.ray, ProbeError):
        return skipped(f"{words}; Ray, above, cannot be asked")
    cluster = case.seen.cluster
    if cluster:
        have, npus, each = int(cluster["available"].get("CPU", 0)), cluster["npus"], cluster["cpus"]
    else:
        npus, each = [case.ranks] * case.nodes, [machine.cpus()] * case.nodes
        have = sum(each)
    if have < need:
        return failed(f"{words}; there are {have}: upstream would wait for ever")
    width = min(case.seen.ray_would_count or case.ranks, case.npus)
    lacking = placed(width, case.npus, npus) and lacking_cpus(recipe, width, npus, each)
    if lacking:
        return failed(lacking)
    return passed(f"{words}; there are {have}")


def threads(machine: Machine, case: Case) -> Check:
    """Threads of ranks and of Ray's processes, whose gRPC has some for each CPU (verl issue 719,
    vllm issue 6295).
    """
    need = case.ranks * THREADS + machine.cpus() * THREADS_OF_A_CPU
    limit, most = min(machine.threads().items(), key=lambda item: item[1])
    words = f"{limit} = {most:,}; {case.ranks} ranks and Ray on {machine.cpus()} CPUs may start "
    return enough(most, 0, need, f"{words}{need:,}, of {THREADS} a rank, which is assumed")


def user(machine: Machine, case: Case) -> Check:
    """HCCL asks for the user's name (vllm-ascend issue 9490: error 19, and nothing else), and
    CANN's compiler writes kernel_meta into the folder that Ray was started in (issue 2748).
    """
    name = machine.user()
    if name is None:
        return warning(
            "the user of this process has no name in /etc/passwd: HCCL was seen to end with "
            '"HcclGetRootInfo ... error code is 19"'
        )
    if case.npus_here and not machine.writable("."):
        return warning(
            "this folder cannot be written: CANN's compiler writes kernel_meta into the one that "
            'Ray is started in ("Failed to init tbe")',
            "A checkout that can be written; or start Ray elsewhere, and join it (RAY_ADDRESS)",
        )
    return passed(f"{name}, and this folder can be written")


def run_root(machine: Machine, case: Case) -> Check | None:
    root = case.recipe.run.root
    if machine.writable(root):
        return None
    return failed(f"run.root = {root} cannot be written")


def run_disk(machine: Machine, case: Case) -> Check:
    """Room for the run's checkpoints. Sizes are computed: 2 bytes a weight, and 12 of AdamW for
    each one that is trained, in every rank's file.
    """
    run, plan = case.recipe.run, case.legal
    free = machine.disk_free(run.root)
    if not case.upstream:
        return enough(free, 0, 10**9, f"{gigabytes(free)} free for {run.root}")
    if plan is None:
        return skipped(f"{gigabytes(free)} free for {run.root}; no legal layout to compute with")
    trained = _per_rank(plan, training_weights)
    if plan.lora:
        trained = _per_rank(plan, adapter_weights, settings_of(case.recipe))
    size = BF16 * trained
    if not case.recipe.npu.no_save_optim:
        size += ADAMW * trained
    saves = max(1, run.train_iters // (run.save_interval or run.train_iters))
    words = f"about {gigabytes(size * saves)} needed ({saves} x {gigabytes(size)}), "
    words += f"{gigabytes(free)} free for {run.root}"
    return enough(free, size, size * saves, words)


def base_disk(machine: Machine, case: Case) -> Check | None:
    """Room for the converted base weights."""
    load, plan = case.recipe.model.load or "", case.legal
    if not machine.writable(load):
        return failed(f"{load} cannot be written: the base weights are converted into it")
    if plan is None:
        return None
    size, free = BF16 * _per_rank(plan, training_weights), machine.disk_free(load)
    words = f"about {gigabytes(size)} needed, {gigabytes(free)} free for {load}"
    return enough(free, size, size, words)


def _per_rank(plan: Plan, weights: Callable[..., tuple[int, int]], *settings: Settings) -> int:
    """Weights in the files of all tensor, pipeline and expert ranks; `weights` has those of one."""
    stages = [sum(weights(plan, *settings, stage)) for stage in range(plan.layout.pp)]
    return plan.layout.tp * plan.layout.ep * sum(stages)


def host_memory(machine: Machine, case: Case) -> Check:
    """What processes of this machine can still have, against what its ranks load at once. Every
    rank reads its whole file before its weights go to the die (megatron/training/checkpointing.py,
    torch.load); what is trained, its gradients and optimizer state are offloaded to the host while
    vLLM runs.
    """
    room, plan = machine.memory(), case.legal
    if plan is None or not room:
        return skipped("no legal layout to compute with, or no size of memory")
    ranks, (limit, free) = case.ranks, _least(room)
    layout, files = plan.layout, 0
    if case.recipe.model.load:
        files = BF16 * _per_rank(plan, training_weights) * ranks
        files //= layout.tp * layout.pp * layout.ep
    kinds = ["adapters and optimizer", *["training weights"] * (not plan.lora)]
    held = estimate(plan, settings_of(case.recipe)).moments["update"]
    offloaded = ranks * sum(part.bytes for part in held if part.kind in kinds)
    least = max(files, offloaded)
    need = least + ranks * PROCESS
    return enough(
        free,
        least,
        need,
        f"{ranks} ranks load {gigabytes(files)} of base weights at once, later "
        f"{gigabytes(offloaded)} are offloaded here; with {gigabytes(PROCESS)} assumed for each "
        f"process about {gigabytes(need)}. {gigabytes(free)} are left ({limit})",
    )


def conversion_memory(machine: Machine, case: Case) -> Check | None:
    """The converter holds a pipeline stage's weights, and up to as much again in their new form
    (convert_hf2mg.py).
    """
    room, plan = machine.memory(), case.legal
    if plan is None or not room:
        return None
    limit, free = _least(room)
    weights = BF16 * model_parameters(plan.shape) // plan.layout.pp
    words = f"the converter holds {gigabytes(weights)} of weights, and up to as much again in "
    words += f"their new form; {gigabytes(free)} are left ({limit})"
    return enough(free, weights, 2 * weights, words)


def _least(room: dict[str, int]) -> tuple[str, int]:
    return min(room.items(), key=lambda item: item[1])


def panic_on_oom(machine: Machine, case: Case) -> Check:
    value = (machine.read("/proc/sys/vm/panic_on_oom") or "").strip()
    if value in ("", "0"):
        return passed(value or "cannot be read here")
    return warning(f"{value}: the whole machine reboots when host memory runs out")


def jemalloc(machine: Machine, case: Case) -> Check:
    preloaded = re.findall(r"[^\s:]*jemalloc[^\s:]*", machine.environment.get("LD_PRELOAD", ""))
    if not preloaded:
        return warning("not in LD_PRELOAD; the workers' host memory fragments without it")
    if machine.glob(preloaded[0]):
        return passed(preloaded[0])
    return warning(f"LD_PRELOAD names {preloaded[0]}, which is not there")
