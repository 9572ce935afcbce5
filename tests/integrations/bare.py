"""The plugin where only torch, vLLM and NumPy are installed:

    python bare.py FOLDER

Each way in is imported; a worker syncs, is told what its noise did, is resumed, and rounds without
bias; the report is printed.
"""

import sys
from types import SimpleNamespace

import torch  # noqa: F401

# vllm: only `register` and `keep_weights` import it
BLOCKED = """
hydra omegaconf pydantic matplotlib scipy pyarrow yaml rich megatron psutil ray safetensors
transformers vllm
"""


class Nothing:
    """In the place of verl's extension of a worker, and of ms-swift's trainer."""

    _prepare_vllm_engine = None


def stand_in(name: str, **values: object) -> None:
    for end in range(1, name.count(".") + 2):
        sys.modules[".".join(name.split(".")[:end])] = SimpleNamespace(__path__=[], **values)


VERL = {"vLLMColocateWorkerExtension": Nothing, "ServerAdapter": Nothing}
stand_in("verl.workers.rollout.vllm_rollout.utils", **VERL)
stand_in("swift.rlhf_trainers.rollout_mixin", RolloutTrainerMixin=Nothing)
for name in BLOCKED.split():
    sys.modules[name] = None

import mindspeed_qerl.integrations.swift
import mindspeed_qerl.integrations.trl
import mindspeed_qerl.integrations.verl  # noqa: F401
from mindspeed_qerl.common.entry import quietly
from mindspeed_qerl.integrations import report
from tests.integrations.test_worker import Model, serve, steps_that_are_told, sync

[folder] = sys.argv[1:]
rounding, rollout = serve(f"{folder}/rounded", Model().bfloat16(), rounding="unbiased")
sync(rounding, 1.001)
rounding.execute_model()
assert rollout.unbiased == {"head.weight"}
steps_that_are_told(folder, 0, 4)
steps_that_are_told(folder, 4, 6)  # resumed: what was told before is read
sys.argv[1:] = [folder]
quietly(report.main)
