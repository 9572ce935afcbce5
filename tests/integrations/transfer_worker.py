"""Ten syncs by vLLM's own weight transfer, as TRL's server has it, on a CPU:

    python transfer_worker.py MODEL

The engine is vLLM's for NCCL but for the transport, a file. Every second sync leaves out the norms.
"""

import os
import sys

import torch
import transformers
from vllm import LLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from mindspeed_qerl.integrations.cpu import keep_weights
from tests.integrations.programs import check_step


class FileEngine(NCCLWeightTransferEngine):
    def update_weights(self, update_info: dict) -> None:
        for name, weight in torch.load(update_info["file"]).items():
            self.model.load_weights([(name, weight)])


class InPlaceEngine(FileEngine):
    """Its updates go into the tensors that are there, as those of vLLM's sparse and m2n engines."""

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass


class SparseFileEngine(InPlaceEngine):
    """vLLM's patches; of each tensor every second element."""

    def update_weights(self, update_info: dict) -> None:
        patches = []
        for name, weight in torch.load(update_info["file"]).items():
            places = torch.arange(0, weight.numel(), 2)
            values = weight.flatten()[places]
            patches.append(
                CheckpointWeightPatch(name, tuple(weight.shape), weight.dtype, values, places)
            )
        load_checkpoint_weight_patches(self.model, patches)


class M2NFileEngine(InPlaceEngine):
    """Puts what has vLLM's own name and shape in its place, as m2n does, and loads the rest."""

    def update_weights(self, update_info: dict) -> None:
        parameters = dict(self.model.named_parameters())
        for name, weight in torch.load(update_info["file"]).items():
            if name in parameters and parameters[name].shape == weight.shape:
                parameters[name].data.copy_(weight)
            else:
                self.model.load_weights([(name, weight)])


for kind in (FileEngine, SparseFileEngine, M2NFileEngine):
    WeightTransferEngineFactory.register_engine(kind.__name__, kind)


def engine(model: str, backend="FileEngine", **words) -> LLM:
    keep_weights()
    return LLM(
        model,
        max_model_len=128,
        enforce_eager=True,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        **{"dtype": "float32", **words},
    )


def transfer(llm: LLM, sent: dict[str, torch.Tensor]) -> None:
    file = f"weights{os.getpid()}.pt"
    torch.save(sent, file)
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"file": file},))
    llm.collective_rpc("finish_weight_update")
    llm.reset_prefix_cache()


def main(model: str) -> None:
    llm = engine(model)
    twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for step in range(10):
        sent = {}
        for name, weight in twin.named_parameters():
            if "norm" in name and step % 2:
                continue
            weight.data.add_(0.01 * torch.randn_like(weight))
            sent[name] = weight.detach().clone()
        transfer(llm, sent)
        check_step(llm, twin, step)


if __name__ == "__main__":
    main(*sys.argv[1:])
