"""Whether a worker could import what it imports: a process that tries."""

import sys
from collections.abc import Iterator

from mindspeed_qerl.ascend.imports import PROBE, way_out
from mindspeed_qerl.ascend.limits import worker_environment
from mindspeed_qerl.preflight.case import FAILED, PASSED, SKIPPED, WARNING, Case, Check
from mindspeed_qerl.preflight.machine import Machine, ProbeError

LIMIT = 120  # seconds; on emulated NPUs they take 20, from a cold disk longer
PACKAGES = (
    "torch",
    "torch_npu",
    "vllm",
    "transformers",
    "tensordict",
    "mindspeed_rl",
    "mindspeed_llm",
    "mindspeed",
    "megatron",
    "vllm_ascend",
)


def imports(machine: Machine, case: Case) -> Iterator[Check]:
    """The imports of ascend/imports.py in a process with the environment of a worker, which is the
    shell's and what the engine sets. It opens no die.
    """
    name = "imports of a worker"
    if not case.on_npus:
        yield Check(name, SKIPPED, "no NPU is used")
        return
    if not case.seen.any:
        yield Check(name, SKIPPED, "no NPU here: torch_npu cannot be imported without its driver")
        return
    if missing := [package for package in PACKAGES if not machine.importable(package)]:
        yield Check(name, SKIPPED, f"not tried: there is no {', '.join(missing)}, see above")
        return
    environment = {**machine.environment, **worker_environment(case.recipe, machine.environment)}
    try:
        said = (
            machine.run([sys.executable, "-c", PROBE], LIMIT, environment).strip().splitlines()[-1:]
        )
    except (
        ProbeError
    ) as error:  # a crash, or no answer; the last line of stderr is what was imported
        yield Check(
            name,
            FAILED,
            f"{str(error).removeprefix(f'{sys.executable}: ')}; every worker would do the same",
            "python -X faulthandler -c 'import torch, torch_npu, vllm'    # where it is\nA slow "
            "disk? Again: now it is in the cache",
        )
        return
    found = said[0] if said else "nothing was said"
    if found.startswith("imported"):
        yield Check(name, PASSED, f"{found}, with the environment of a worker")
        return
    # vllm_ascend/utils.py:191-212: it only warns, and runs with other kernels
    state = WARNING if "import vllm_ascend_C:" in found else FAILED
    yield Check(name, state, found, way_out(found))
