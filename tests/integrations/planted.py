"""Faults between what a stack sends and what vLLM loads, below the proof of arrival."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from mindspeed_qerl.lora.arrival import PREFIX, parts_of

FIRST = re.compile(
    r"model\.layers\.0\.self_attn\.(q|qkv)_proj(\.base_layer)?\.weight"
)  # once a sync
OLD = "it is still what the sync before had sent"
HEALTHY = 50  # syncs
MISSED = 10  # step of TRL that gets no sync
# of a tensor: the name under which it is loaded, or what is loaded in its place (None: nothing)
Change = str | Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor | None]


class Fault(NamedTuple):
    """What is changed, by the tensor's name; what the report has to say of it."""

    changes: dict[str, Change]
    words: str = ""  # a pattern; else that the tensor is the other one

    def named(self) -> dict[str, str]:
        """Returns the expected problem of each tensor."""
        return {
            change if isinstance(change, str) else name: self.words or f"it is {name}"
            for name, change in self.changes.items()
        }


def nothing(sent, last):
    """Leaves a tensor out."""


def zero(sent, last):
    return 0 * sent


def faults_of(matrix: str, gate: str, up: str) -> dict[str, Fault]:
    """Returns a fault of each kind by its name; gate, up: names of tensors of one shape."""
    twin = matrix.replace("layers.1", "layers.0")
    return {
        "dropped": Fault({matrix: nothing}, OLD),
        "zero": Fault({matrix: zero}, "all of it is 0"),
        "stale": Fault({matrix: lambda sent, last: last[matrix]}, OLD),
        "rounded": Fault({matrix: lambda sent, last: sent.bfloat16().to(sent.dtype)}, "rounded"),
        "another layer's": Fault({matrix: lambda sent, last: last[twin]}, f"it is {twin}"),
        "gate and up": Fault({gate: up, up: gate}),
        "rows": Fault({matrix: lambda sent, last: sent.roll(len(sent) // 2, 0)}, "elements differ"),
        "scaled": Fault({matrix: lambda sent, last: 1.02 * sent}, "it is 1.02 times"),
        "NaN": Fault({matrix: lambda sent, last: torch.nan * sent}, "it has NaN"),
    }


def weight_faults(family: str) -> dict[str, Fault]:
    """Returns those of a model's weights; NaN, from which no trainer recovers, is the last."""
    mlp = "model.layers.1.mlp."
    if family == "qwen3":
        return faults_of(mlp + "down_proj.weight", mlp + "gate_proj.weight", mlp + "up_proj.weight")
    if family == "phi3":  # gate and up are one: of two layers
        fused = [f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in (0, 1)]
        return faults_of(mlp + "down_proj.weight", *fused)
    third, fifth = (
        [f"{mlp}experts.{expert}.{leaf}_proj.weight" for leaf in ("gate", "up", "down")]
        for expert in (3, 5)
    )
    exchanged = [{a: b, b: a} for a, b in zip(third, fifth)]
    gate, up, down = third
    return {
        "experts in w13": Fault(exchanged[0] | exchanged[1]),
        "experts in w2": Fault(exchanged[2]),
        "an expert zero": Fault(dict.fromkeys(third, zero), "all of it is 0"),
        **faults_of(down, gate, up),
    }


def adapter_faults() -> dict[str, Fault]:
    """Returns those of adapters by their B, of which one comes without its A, too."""
    layer = "model.layers.1."
    o, gate, up = (
        f"{layer}{module}_proj.lora_B.weight" for module in ("self_attn.o", "mlp.gate", "mlp.up")
    )
    both = dict.fromkeys((o, o.replace("lora_B", "lora_A")), nothing)
    return faults_of(o, gate, up) | {"dropped": Fault(both, "all of it is 0")}


def faults_by_sync(stack: str, family: str) -> dict[int, Fault]:
    """Returns the faults of a program (planted_run.py), by the number of the sync, from 1: of its
    last syncs every second one has a fault.
    """
    faults = adapter_faults() if "adapters" in stack else weight_faults(family)
    if stack.startswith("transfer") and family == "qwen3_moe":
        # vLLM's reload of a layer takes new memory, and leaves what did not come as it finds it
        faults["dropped"] = faults["dropped"]._replace(words=".")
    if stack == "int8":  # faults of what is compared there
        faults = faults_of(*(f"model.layers.{layer}.input_layernorm.weight" for layer in (1, 0, 1)))
    if stack == "sparse":  # of which vLLM takes the elements that were changed, and no others
        faults = {kind: faults[kind] for kind in ("dropped", "scaled")}
    if stack == "m2n":  # which loads what vLLM has fused
        faults = {"gate and up": faults["gate and up"]}
    first = HEALTHY + 2 - len(faults)
    return {first + 2 * number: fault for number, fault in enumerate(faults.values())}


class Loader:
    """Loads what a stack sends into vLLM, with a fault in some of the syncs.

    Args:
        faults: by the number of the sync. rank: that has them; None: all have.
    """

    def __init__(self, faults: dict[int, Fault], rank: int | None):
        self.faults = faults
        self.rank = rank
        self.sync = -1  # vLLM's own load from disk is none
        self.last: dict[str, torch.Tensor] = {}

    def planted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator:
        for whole, stacked in pairs:
            self.sync += bool(FIRST.fullmatch(whole))
            is_planted = self.sync in self.faults and self.rank in (None, tensor_rank())
            changes = self.faults[self.sync].changes if is_planted else {}
            # vLLM loads each expert, too
            parts = parts_of(whole, stacked) if ".experts." in whole else [(whole, stacked)]
            for name, tensor in parts:
                key = PREFIX.sub("", name)
                change = changes.get(key, key)
                if isinstance(change, str):
                    yield name.replace(key, change), tensor
                elif (changed := change(tensor, self.last)) is not None:
                    yield name, changed
                self.last[key] = tensor.clone()

    def below(self, load: Callable) -> Callable:
        return lambda model, pairs: load(model, self.planted(pairs))

    def install(self) -> None:
        """Puts it below the proof, which wraps the methods of objects."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.model_executor.models.phi3 import Phi3ForCausalLM
        from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
        from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

        for kind in (Phi3ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM):
            kind.load_weights = self.below(kind.load_weights)
        from_tensors = LoRAModel.from_lora_tensors.__func__

        def from_planted(cls, *, tensors, **words):
            self.sync += 1
            return from_tensors(cls, tensors=dict(self.planted(tensors.items())), **words)

        LoRAModel.from_lora_tensors = classmethod(from_planted)


def tensor_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()
