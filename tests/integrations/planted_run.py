"""Syncs of a stack with vLLM on a CPU, of which some have a planted fault (planted.py):

python planted_run.py STACK FAMILY MODEL
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from vllm.lora.request import LoRARequest
from vllm.v1.worker.cpu_worker import CPUWorker

from mindspeed_qerl.integrations.cpu import keep_weights
from mindspeed_qerl.integrations.vllm import WorkerRollout
from tests.integrations import transfer_worker
from tests.integrations.planted import HEALTHY, MISSED, Loader, faults_by_sync


def sample(llm, lora=None) -> None:
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False, lora_request=lora)


def trl(model: str, syncs: int) -> None:
    from mindspeed_qerl.integrations.trl import add_noise
    from tests.integrations.trl_colocated import trainer_of

    trainer = trainer_of(model, Path("trl"), max_steps=syncs + 1, learning_rate=1e-3)
    add_noise(trainer, report="report", noise=None, stop=False)
    sync = trainer.vllm_generation.sync_weights

    def sync_but_once() -> None:
        if trainer.state.global_step != MISSED:
            sync()

    trainer.vllm_generation.sync_weights = sync_but_once
    trainer.train()


def change(twin, is_changed=lambda name: True) -> None:
    """Does what a trainer's step does, to every second element."""
    for name, weight in twin.named_parameters():
        if is_changed(name):
            flat = weight.data.view(-1)[::2]
            flat.add_(0.01 * torch.randn_like(flat))


def quantized(weights) -> dict[str, torch.Tensor]:
    """`weights`, those of linear layers as integers and a scale of each output."""
    sent = {}
    for name, weight in weights:
        sent[name] = weight
        if "_proj" in name:
            scale = sent[name + "_scale"] = weight.abs().amax(1, keepdim=True) / 127
            sent[name] = (weight / scale).round().char()
    return sent


def transfer(model: str, syncs: int, **words) -> None:
    twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    llm = transfer_worker.engine(model, **words)
    for _ in range(syncs):
        change(twin)
        form = quantized if "hf_overrides" in words else dict
        transfer_worker.transfer(llm, form(twin.named_parameters()))
        sample(llm)


def replica(rank: int, model: str, syncs: int) -> None:
    """One of two engines, of which the second has no noise after the healthy syncs."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(rank)
    if rank:
        put_on = WorkerRollout._put_on
        WorkerRollout._put_on = lambda self: self.syncs > HEALTHY or put_on(self)
    torch.manual_seed(0)
    transfer(model, syncs)


def transfer_dp(model: str, syncs: int) -> None:
    torch.multiprocessing.spawn(replica, (model, syncs), 2)


def path_adapters(model: str, syncs: int) -> None:
    """Adapters that are given to `generate` by their path; and three requests that lack theirs."""
    twin = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    base = {name: weight.detach().clone() for name, weight in twin.named_parameters()}
    twin = get_peft_model(twin, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    llm = transfer_worker.engine(model, enable_lora=True, max_lora_rank=8)
    for number in range(1, syncs + 1):
        change(twin, lambda name: "lora_" in name)
        twin.save_pretrained(f"adapter{number}")
        lora = LoRARequest(f"adapter{number}", number, f"adapter{number}")
        if number > 10:  # as vLLM's server loads it
            llm.llm_engine.add_lora(lora)
        sample(llm, lora)
    sample(llm)
    transfer_worker.transfer(llm, base)
    sample(llm)
    sample(llm, lora)
    change(twin, lambda name: "lora_" in name)
    twin.save_pretrained(f"adapter{number}")  # under a name of which vLLM has an older one
    sample(llm, lora)


def verl(model: str, syncs: int, mode: str = "merged") -> None:
    from tests.integrations.verl_worker import Trainer, replace_what_a_cpu_has_not

    replace_what_a_cpu_has_not()
    trainer = Trainer(model, mode)
    sample(trainer.llm)  # with the base of adapters, which is a sync
    for _ in range(syncs):
        trainer.sync()
        sample(trainer.llm, trainer.lora)
    if trainer.lora:
        sample(trainer.llm)


def verl_adapters(model: str, syncs: int) -> None:
    verl(model, syncs, "adapters")


# of vLLM's engine, which is synced by its transfer; 8-bit integers as compressed-tensors has them
WORDS = json.loads("""{
    "transfer": {},
    "transfer_tp": {"tensor_parallel_size": 2},
    "transfer_pp": {"pipeline_parallel_size": 2},
    "sparse": {"backend": "SparseFileEngine"},
    "m2n": {"backend": "M2NFileEngine"},
    "int8": {"hf_overrides": {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "dynamic": true
            }
        }}
    }}}
}""")
STACKS = {name: partial(transfer, **words) for name, words in WORDS.items()}
STACKS |= {each.__name__: each for each in (trl, transfer_dp, path_adapters, verl, verl_adapters)}


def prepare(stack: str, family: str) -> int:
    """Plants the faults in this process; returns how many."""
    faults = faults_by_sync(stack, family)
    # eager CPU workers make no dummy run, without which a stage has no place for what it is sent
    CPUWorker._should_warm_up_model = lambda self: self.model_runner.profile_run()
    Loader(faults, rank=1 if stack == "transfer_tp" else None).install()
    return len(faults)


if __name__ == "__mp_main__":  # a worker of vLLM
    keep_weights()
    prepare(*sys.argv[1:3])
if __name__ == "__main__":
    stack, family, model = sys.argv[1:]
    STACKS[stack](model, HEALTHY + prepare(stack, family))
