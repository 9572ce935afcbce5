"""The host: CPUs, limits, memory, disks."""

from collections.abc import Callable

from mindspeed_qerl.ascend.limits import needed_cpus
from mindspeed_qerl.layout.memory import settings_of
from mindspeed_qerl.layout.parts import ADAMW, BF16, Settings, adapter_weights
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.weights import model_parameters, training_weights
from mindspeed_qerl.preflight.case import Case, Check, enough, failed, gigabytes, passed, warning

# bytes of a rank's process without weights: assumed for Python, torch, CANN, vLLM; never measured
PROCESS = 4 * 10**9


def at_least(
    case: Case,
    name: str,
    measure: str,
    need: float,
    words: str,
    least: float = 0,
    path: str = "",
    per_rank: bool = False,
) -> Check:
    """A number of the machine, a method of `Machine`, against what a run needs, or each rank."""
    have = getattr(case.machine, measure)(*filter(None, [path]))
    if per_rank:
        need *= case.ranks
    return enough(have, least, need, words.format(have, need))


def cpus(case: Case) -> Check:
    """CPUs that upstream reserves, against those that the running Ray has."""
    need, cluster = needed_cpus(case.recipe), case.seen.ray
    words = f"{case.npus} NPUs and Ray's other tasks reserve {need} logical CPUs"
    if cluster is None:
        return passed(f"{words}: places, not threads; the Ray of the run is told to have them")
    free = int(cluster["available"].get("CPU", 0))
    return enough(free, need, need, f"{words}; the running Ray has {free} free")


def user(case: Case) -> Check:
    """HCCL asks for the user's name (vllm-ascend issue 9490: error 19, and nothing else), and
    CANN's compiler writes kernel_meta into the folder that Ray was started in (issue 2748).
    """
    name = case.machine.user()
    if name is None:
        return warning(
            "the user of this process has no name in /etc/passwd: HCCL was seen to end with "
            '"HcclGetRootInfo ... error code is 19"'
        )
    if not case.machine.writable("."):
        return warning(
            "this folder cannot be written: CANN's compiler writes kernel_meta into the one that "
            'Ray is started in ("Failed to init tbe")'
        )
    return passed(f"{name}, and this folder can be written")


def run_root(case: Case) -> Check | None:
    root = case.recipe.run.root
    if case.machine.writable(root):
        return None
    return failed(f"run.root = {root} cannot be written")


def run_disk(case: Case) -> Check:
    """Room for the run's checkpoints. Sizes are computed: 2 bytes a weight, and 12 of AdamW for
    each one that is trained, in every rank's file.
    """
    run, plan = case.recipe.run, case.legal
    assert plan
    trained = _per_rank(plan, training_weights)
    if plan.lora:
        trained = _per_rank(plan, adapter_weights, settings_of(case.recipe))
    size = BF16 * trained
    if not case.recipe.npu.no_save_optim:
        size += ADAMW * trained
    saves = max(1, run.train_iters // (run.save_interval or run.train_iters))
    free = case.machine.disk_free(run.root)
    return enough(
        free,
        size,
        size * saves,
        f"about {gigabytes(size * saves)} needed ({saves} x {gigabytes(size)}), "
        f"{gigabytes(free)} free for {run.root}",
    )


def base_disk(case: Case) -> Check:
    """Room for the converted base weights."""
    load, plan = case.recipe.model.load, case.legal
    assert load and plan
    if not case.machine.writable(load):
        return failed(f"{load} cannot be written: the base weights are converted into it")
    size, free = BF16 * _per_rank(plan, training_weights), case.machine.disk_free(load)
    words = f"about {gigabytes(size)} needed, {gigabytes(free)} free for {load}"
    return enough(free, size, size, words)


def _per_rank(plan: Plan, weights: Callable[..., tuple[int, int]], *settings: Settings) -> int:
    """Weights in the files of all tensor, pipeline and expert ranks; `weights` has those of one."""
    stages = [sum(weights(plan, *settings, stage)) for stage in range(plan.layout.pp)]
    return plan.layout.tp * plan.layout.ep * sum(stages)


def host_memory(case: Case) -> Check:
    """What processes of this machine can still have, against what its ranks load at once. Every
    rank reads its whole file before its weights go to the die (megatron/training/checkpointing.py,
    torch.load).
    """
    plan, (free, limit) = case.legal, case.machine.memory()
    assert plan
    layout, files = plan.layout, BF16 * _per_rank(plan, training_weights) * case.ranks
    files //= layout.tp * layout.pp * layout.ep
    need = files + case.ranks * PROCESS
    return enough(
        free,
        files,
        need,
        f"{case.ranks} ranks load {gigabytes(files)} of base weights at once; with "
        f"{gigabytes(PROCESS)} assumed for each process about {gigabytes(need)}. "
        f"{gigabytes(free)} are left ({limit})",
    )


def conversion_memory(case: Case) -> Check:
    """The converter holds the weights, and up to as much again in their new form
    (convert_hf2mg.py).
    """
    plan, (free, limit) = case.legal, case.machine.memory()
    assert plan
    weights = BF16 * model_parameters(plan.shape)
    return enough(
        free,
        weights,
        2 * weights,
        f"the converter holds {gigabytes(weights)} of weights, and up to as much again in their "
        f"new form; {gigabytes(free)} are left ({limit})",
    )


def panic_on_oom(case: Case) -> Check | None:
    if case.machine.read("/proc/sys/vm/panic_on_oom").strip() in ("", "0"):
        return None
    return warning("the whole machine reboots when host memory runs out")
