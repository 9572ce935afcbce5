"""Ten syncs of verl's own sender and worker extension with a vLLM engine on a CPU:

    python verl_worker.py MODEL merged|adapters

The worker's norms are those that were sent plus noise of this step, never of two.
"""

import asyncio
import json
import os
import sys
import threading
from types import SimpleNamespace

import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm import LLM
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import WeightsMapper

from mindspeed_qerl.integrations.cpu import keep_weights
from tests.integrations.programs import check_step, norms_of

LORA = json.loads("""{
    "r": 8, "lora_alpha": 16,
    "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
}""")


def replace_what_a_cpu_has_not() -> None:
    nothing = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    transfer.get_torch_device = lambda: nothing  # torch.cuda there
    transfer.is_support_ipc = lambda: False
    # verl 0.9.1 calls it by the name that it had until vLLM 0.32
    WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
    keep_weights()


class Trainer:
    """transformers' model, changed a little before each sync; `llm` is verl's rollout."""

    def __init__(self, model: str, mode: str):
        self.twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.has_adapters = mode == "adapters"
        words = {"enable_lora": True, "max_lora_rank": 8} if self.has_adapters else {}
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=128,
            enforce_eager=True,
            worker_extension_cls="mindspeed_qerl.integrations.verl.VerlNoiseExtension",
            **words,
        )
        self.handle = self.llm.collective_rpc("_get_zmq_handle")[0]
        self.lora = None
        if self.has_adapters:
            self.lora = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
            self.twin = get_peft_model(self.twin, LoraConfig(**LORA))
            base = (pair for pair in self.named() if "lora_" not in pair[0])
            self.send(base, peft_config=LORA, base_sync_done=False)

    def named(self):
        for name, weight in self.twin.named_parameters():
            yield name.removeprefix("base_model.model."), weight.detach().clone()

    def sync(self) -> None:
        with torch.no_grad():
            for name, weight in self.twin.named_parameters():
                if "lora_" in name or not self.has_adapters:
                    weight.add_(0.01 * torch.randn_like(weight))
        if self.has_adapters:
            adapters = get_peft_model_state_dict(self.twin)
            self.send(adapters.items(), peft_config=LORA, base_sync_done=True)
        else:
            self.send(self.named())

    def send(self, weights, **words) -> None:
        sender = transfer.BucketedWeightSender(self.handle, 64, use_shm=True)
        coroutine = sender.async_send_weights(iter(list(weights)))
        thread = threading.Thread(target=asyncio.run, args=(coroutine,))
        thread.start()
        self.llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, **words})
        thread.join()
        self.llm.reset_prefix_cache()


def main(model: str, mode: str) -> None:
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), os._exit(3))
    replace_what_a_cpu_has_not()
    trainer = Trainer(model, mode)
    twin = trainer.twin.base_model.model if trainer.has_adapters else trainer.twin
    for step in range(10):
        trainer.sync()
        worker = check_step(trainer.llm, twin, step, trainer.lora)
    with worker.mindspeed_qerl_rollout.clean():
        for name, weight in norms_of(worker.get_model()).items():
            assert torch.equal(weight, norms_of(twin)[name]), name


if __name__ == "__main__":
    main(*sys.argv[1:])
