"""The host: CPUs, limits, memory, disks."""

from collections.abc import Callable
from functools import partial

from mindspeed_qerl.ascend.limits import needed_cpus
from mindspeed_qerl.layout.memory import settings_of
from mindspeed_qerl.layout.parts import ADAMW, BF16, Settings, adapter_weights
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.sizes import model_parameters, training_weights
from mindspeed_qerl.preflight.case import (
    Case,
    Check,
    Question,
    enough,
    failed,
    gigabytes,
    passed,
    warning,
)

# bytes of a rank's process without weights: assumed for Python, torch, CANN, vLLM; never measured
PROCESS = 4 * 10**9


def at_least(
    case: Case,
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
    need = needed_cpus(case.recipe)
    cluster = case.seen.ray
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
    run = case.recipe.run
    plan = case.legal
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
    load = case.recipe.model.load
    plan = case.legal
    assert load and plan
    if not case.machine.writable(load):
        return failed(f"{load} cannot be written: the base weights are converted into it")
    size = BF16 * _per_rank(plan, training_weights)
    free = case.machine.disk_free(load)
    words = f"about {gigabytes(size)} needed, {gigabytes(free)} free for {load}"
    return enough(free, size, size, words)


def _per_rank(plan: Plan, weights: Callable[..., tuple[int, int]], *settings: Settings) -> int:
    """Weights in the files of all tensor, pipeline and expert ranks; `weights` has those of one."""
    stages = [sum(weights(plan, *settings, stage)) for stage in range(plan.layout.pp)]
    return plan.layout.tp * plan.layout.ep * sum(stages)


def host_memory(case: Case) -> Check:
    """Compares what processes of this machine can still have with what its ranks load at once.
    Every rank reads its whole file before its weights go to the die
    (megatron/training/checkpointing.py, torch.load).
    """
    plan = case.legal
    (free, limit) = case.machine.memory()
    assert plan
    layout = plan.layout
    files = BF16 * _per_rank(plan, training_weights) * case.ranks
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
    plan = case.legal
    (free, limit) = case.machine.memory()
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


ROWS = [
    Question(
        "CPUs",
        "Has the running Ray the logical CPUs that upstream reserves?",
        cpus,
        "ray start ... --num-cpus=N    # on each node; they are places, not threads\n"
        "or lower rl_config.num_cpus_for_placement_group",
        "on_npus",
    ),
    Question(
        "CPUs to run on",
        "Do taskset, numactl and the container's cpuset leave 5 CPUs for each rank?",
        partial(
            at_least,
            measure="cpus",
            need=5,
            per_rank=True,
            words="{:,}, and vllm-ascend wants 5 for each rank: {:,}",
        ),
        "grep Cpus_allowed_list /proc/self/status    # leave out taskset or numactl, or the "
        "container's --cpuset-cpus",
        "on_npus",
    ),
    Question(
        "host memory",
        "Is there host memory for what all ranks load at once?",
        host_memory,
        "Raise the container's --memory, end what holds the memory (ps -eo pid,rss,args "
        "--sort -rss | head), or use fewer ranks here",
        "on_npus legal",
    ),
    Question(
        "memory to convert",
        "Is there host memory to convert the base weights?",
        conversion_memory,
        "Convert on a machine with more memory, and copy the result here",
        "base_to_convert legal",
    ),
    Question(
        "open files",
        "Is `ulimit -n` 32,768?",
        partial(
            at_least,
            measure="open_files",
            need=32768,
            words="ulimit -n is {:,}; Ray's and HCCL's connections may need {:,}",
        ),
        "ulimit -n 32768    # in the shell that starts the run",
        "upstream",
    ),
    Question(
        "threads",
        "May the user start the threads of all ranks?",
        partial(
            at_least,
            measure="threads",
            need=600,
            per_rank=True,
            words="pids.max or ulimit -u is {:,}; with 600 for each rank, which is assumed, {:,} are "
            "started",
        ),
        "Start the container with --pids-limit=-1 --ulimit nproc=65535; ulimit -u 65535",
        "on_npus",
    ),
    Question(
        "user and folder",
        "Has the user a name, and can this folder be written?",
        user,
        'echo "qerl:x:$(id -u):$(id -g)::$HOME:/bin/bash" >> /etc/passwd    # in the image, '
        "or as root\n"
        "A checkout that can be written; or start Ray elsewhere, and join it (RAY_ADDRESS)",
        "on_npus",
    ),
    Question(
        "/dev/shm",
        "Has it 10 GB for Ray's objects?",
        partial(
            at_least,
            measure="disk_free",
            path="/dev/shm",
            need=10000000000,
            words="{:,} bytes free; below {:,} Ray keeps its objects on the disk",
        ),
        "Start the container with --shm-size=64g, or: mount -o remount,size=64G /dev/shm",
        "on_npus",
    ),
    Question(
        "/tmp",
        "Is 7 % of its disk free? Ray stops spilling below 5 %.",
        partial(
            at_least,
            measure="disk_left",
            path="/tmp",
            least=0.05,
            need=0.07,
            words="{:.1%} of its disk are free; below 5 % Ray spills no object, and a run ends with "
            "OutOfDiskError",
        ),
        "du -xh -d 2 /tmp | sort -h | tail    # what fills it? Or another disk for it: -v DIR:/tmp",
        "upstream",
    ),
    Question(
        "run.root", "Can it be written?", run_root, "run.root=DIR    # an override of the config"
    ),
    Question(
        "disk for the run",
        "Is there room for the run's checkpoints?",
        run_disk,
        "run.root=DIR, or a larger megatron_training.save_interval    # overrides of the config",
        "upstream legal",
    ),
    Question(
        "disk for the base",
        "Is there room for the base weights that are converted next?",
        base_disk,
        "actor_config.load=DIR    # an override of the config",
        "base_to_convert legal",
    ),
    Question(
        "vm.panic_on_oom",
        "Does the machine survive a process that takes too much memory?",
        panic_on_oom,
        "sysctl -w vm.panic_on_oom=0",
    ),
]
