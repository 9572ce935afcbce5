"""An emulated NPU: stand-ins that let code written for accelerators, above all unmodified
MindSpeed-RL and vllm-ascend, run on CPUs.

`stand_ins/` holds packages called torch_npu, acl and torchair. Put first on the path they take the
place of the real ones; `environment` says how. What they compute is in operators.py and its
neighbours, what they do to torch in facade.py. docs/architecture.md says which numbers of such a
run mean something and which say nothing about an NPU.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

NUM_NPUS_VARIABLE = "MINDSPEED_QERL_EMULATED_NPUS"
SOC_VARIABLE = "MINDSPEED_QERL_EMULATED_SOC"
CANN_VARIABLE = "MINDSPEED_QERL_EMULATED_CANN"

# Name of a die -> its name in acl.get_soc_name() and its number in torch_npu
# (core/npu/NpuVariables.h), by which vllm-ascend chooses code (utils.py:603): 910B is its A2, 910C
# its A3.
SOCS = {"910B": ("Ascend910B1", 220), "910C": ("Ascend910_9392", 251)}
CANN_VERSIONS = (
    "8.5.0",
    "8.3.RC1",
)  # vllm-ascend asks whether it begins with 8.3; the first is docs/ascend.md's


def device_count() -> int:
    """How many NPUs this emulated machine has: MINDSPEED_QERL_EMULATED_NPUS, 8 if it is not set."""
    return int(os.environ.get(NUM_NPUS_VARIABLE, "8"))


def soc() -> tuple[str, int]:
    """Which die is emulated, a value of SOCS: MINDSPEED_QERL_EMULATED_SOC, 910C if it is not set."""
    return SOCS[os.environ.get(SOC_VARIABLE, "910C")]


def cann_version() -> str:
    """Which CANN is emulated: MINDSPEED_QERL_EMULATED_CANN, 8.5.0 if it is not set."""
    return os.environ.get(CANN_VARIABLE, CANN_VERSIONS[0])


def not_emulated(name: str) -> Callable:
    """A function that raises NotImplementedError naming itself: for what may be read but not
    called.
    """

    def raise_error(*args, **kwargs):
        raise NotImplementedError(f"{name} is not emulated (docs/architecture.md)")

    return raise_error


def environment(num_npus: int, soc: str | None = None, cann: str | None = None) -> dict[str, str]:
    """The environment variables that every process on the emulated NPUs needs, Ray's workers
    included.

    They are to be set before the process starts: PYTHONPATH is read once, at start. The rest of
    PYTHONPATH (upstream's checkouts) is kept behind the stand-ins.

    Args:
        num_npus: what `acl.rt.get_device_count()` and `torch.npu.device_count()` report; each is
            one process on the CPU.
        soc: 910C or 910B. cann: what torch.version.cann says; both choose code in vllm-ascend.
            None: what this process's variables say, else 910C and 8.5.0.

    Raises:
        ValueError: num_npus is less than 1, soc or cann is another.
    """
    if num_npus < 1:
        raise ValueError(f"num_npus is {num_npus}: an emulated machine has at least 1")
    soc = soc or os.environ.get(SOC_VARIABLE, "910C")
    cann = cann or os.environ.get(CANN_VARIABLE, CANN_VERSIONS[0])
    if soc not in SOCS or cann not in CANN_VERSIONS:
        raise ValueError(
            f"soc is {soc!r}, cann is {cann!r}: emulated are {', '.join(SOCS)} with CANN "
            f"{' or '.join(CANN_VERSIONS)}"
        )
    # The stand-ins import mindspeed_qerl, also in a process started elsewhere; last, because
    # upstream has a folder "cli" too.
    package_root = STAND_INS.parents[2]
    path = [
        str(STAND_INS),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
        str(package_root),
    ]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        # Megatron compiles its helpers with `python3 -m pybind11` (core/datasets/Makefile): this
        # one's, though its bin may not be on PATH.
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        ),
        NUM_NPUS_VARIABLE: str(num_npus),
        SOC_VARIABLE: soc,
        CANN_VARIABLE: cann,
        # MindSpeed's op builders join paths to CANN's folder when imported
        # (op_builder/builder.py:29); nothing in it is read.
        "ASCEND_HOME_PATH": str(STAND_INS),
        # Ray sets no ASCEND_RT_VISIBLE_DEVICES of its own, as on the real machine (MindSpeed-RL
        # calls set_device with Ray's id).
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "true",
        # MindSpeed-RL reads it without a default (vllm_engine.py:280) and reaches into the engine
        # in its own process (283).
        "VLLM_USE_V1": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # vLLM's build for CPUs is another version to vllm-ascend (utils.py, vllm_version_is), which
        # asks here first.
        "VLLM_VERSION": "0.11.0",
        # Compiling what runs a few times on a CPU takes longer than running it.
        "TORCHDYNAMO_DISABLE": "1",
        # Several ranks share the cores.
        "OMP_NUM_THREADS": "1",
        # Megatron asserts it for tensor parallelism, whatever the device.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def enter(num_npus: int) -> dict[str, str]:
    """Put this process, which has imported neither torch nor vLLM, and those that it starts on
    emulated NPUs; returns `environment(num_npus)`.
    """
    variables = environment(num_npus)
    os.environ.update(variables)
    sys.path.insert(0, str(STAND_INS))
    return variables
