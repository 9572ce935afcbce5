"""An emulated NPU: stand-ins that let code written for accelerators, above all unmodified MindSpeed-RL, run on CPUs.

`stand_ins/` holds packages called torch_npu, acl, torchair and vllm_ascend. Put first on the path they take the place
of the real ones; `environment` says how. What they compute is in operators.py and attention.py, what they do to torch
in facade.py. docs/emulation.md says which numbers of such a run mean something and which say nothing about an NPU.
"""

import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

NUM_NPUS_VARIABLE = "MINDSPEED_QERL_EMULATED_NPUS"


def device_count() -> int:
    """How many NPUs this emulated machine has: MINDSPEED_QERL_EMULATED_NPUS, 8 if it is not set."""
    return int(os.environ.get(NUM_NPUS_VARIABLE, "8"))


def environment(num_npus: int) -> dict[str, str]:
    """The environment variables that every process on the emulated NPUs needs, Ray's workers included.

    They are to be set before the process starts: PYTHONPATH is read once, at start. The rest of PYTHONPATH (upstream's
    checkouts) is kept behind the stand-ins.

    Args:
        num_npus: what `acl.rt.get_device_count()` and `torch.npu.device_count()` report; each is one process on the
            CPU.

    Raises:
        ValueError: num_npus is less than 1.
    """
    if num_npus < 1:
        raise ValueError(f"num_npus is {num_npus}: an emulated machine has at least 1")
    # The stand-ins import mindspeed_qerl, also in a process started elsewhere; last, because upstream has a folder
    # "cli" too.
    package_root = STAND_INS.parents[2]
    path = [str(STAND_INS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(package_root)]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # Megatron compiles its helpers with `python3 -m pybind11` (core/datasets/Makefile): this one's, though its bin
        # may not be on PATH.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        NUM_NPUS_VARIABLE: str(num_npus),
        # MindSpeed's op builders join paths to CANN's folder when imported (op_builder/builder.py:29); nothing in it
        # is read.
        "ASCEND_HOME_PATH": str(STAND_INS),
        # Ray sets no ASCEND_RT_VISIBLE_DEVICES of its own, as on the real machine (MindSpeed-RL calls set_device with
        # Ray's id).
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "true",
        # MindSpeed-RL reads it without a default (vllm_engine.py:280) and reaches into the engine in its own process
        # (283).
        "VLLM_USE_V1": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # GiB for the KV cache, which vLLM's CPU platform would set to 4 for every engine.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # AMX and SGL kernels repack weights; the sync writes into the weights as they were loaded.
        "VLLM_CPU_SGL_KERNEL": "0",
        # Compiling what runs a few times on a CPU takes longer than running it.
        "TORCHDYNAMO_DISABLE": "1",
        # Several ranks share the cores.
        "OMP_NUM_THREADS": "1",
        # Megatron asserts it for tensor parallelism, whatever the device.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
