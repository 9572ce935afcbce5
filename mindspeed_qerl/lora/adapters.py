"""LoRA (Hu et al. 2021, arXiv 2106.09685) on megatron-core's linear layers, experts included, in
any layout.

    y = W x + (alpha / r) B A x        A: [r, in] Kaiming-uniform, B: [out, r] zero, W frozen

In bfloat16 W x lies on a grid that is wider than what an update adds, so that the sum would be
rounded back to W x. There a layer multiplies with the merged weights that the rollout engine gets
(rounding.py), whose product sums in float32 and rounds once; gradients go straight through to A and
B.

`linear_fc1` and `linear_fc2` are the MLP's in a dense model and every expert's own in an MoE model
(megatron-core's SequentialMLP). The router, the embeddings and the norms are never trained.
"""

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from mindspeed_qerl.common.errors import ConfigError

from .rounding import merged


class LoRALinear(nn.Module):
    """A frozen Megatron linear layer (it returns (output, bias)) with a trainable low-rank update,
    kept in float32.

    Tensor parallel ranks share B [out/tp, r] of a column-parallel layer and A [r, in/tp] of a
    row-parallel one as they share W; the other factor is whole on each rank. Under sequence
    parallelism that one's gradient is of a part of the sequence: it is marked `sequence_parallel`,
    as Megatron marks norms, whose gradients are summed over the group.

    Args:
        base: ColumnParallelLinear or RowParallelLinear. r: rank. alpha: the update is (alpha / r) B
            A.
        seed: of A, which is drawn whole, so that it depends on neither the global generator nor the
            layout.
        is_expert: of one expert: its gradients are reduced over the expert-data-parallel group
            (`allreduce = False`, megatron-core's distributed_data_parallel.py), and no tensor
            parallel rank shares it.
        tp_rank, tp_size: place in the tensor parallel group of attention. name: in the whole model,
            for checkpoints.
    """

    def __init__(
        self,
        base: nn.Module,
        r: int,
        alpha: float,
        seed: int,
        is_expert: bool,
        tp_rank: int = 0,
        tp_size: int = 1,
        name: str = "",
    ):
        super().__init__()
        self.base_layer = base
        self.name = name
        self.scaling = alpha / r
        self.adapters_enabled = True
        self._merged: Tensor | None = None  # since the last update
        out_features, in_features = base.weight.shape
        self.tp_size = 1 if is_expert else tp_size
        self.row_parallel = type(base).__name__ == "RowParallelLinear"
        self.sequence_parallel = self.tp_size > 1 and base.sequence_parallel
        parts = self.tp_size if self.row_parallel else 1  # of A
        whole_in = in_features * parts
        bound = 1.0 / math.sqrt(whole_in)  # Kaiming-uniform with a = sqrt(5), as PEFT initialises A
        generator = torch.Generator().manual_seed(seed)
        a = torch.empty(r, whole_in).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(a.chunk(parts, dim=1)[tp_rank % parts].clone())
        self.lora_B = nn.Parameter(torch.zeros(out_features, r))
        factors = ((self.lora_A, self.row_parallel), (self.lora_B, not self.row_parallel))
        for parameter, shared in factors:
            parameter.allreduce = not is_expert
            parameter.tensor_model_parallel = self.tp_size > 1 and shared
            parameter.sequence_parallel = self.sequence_parallel and not shared

    def forward(self, x: Tensor, *args, **kwargs):
        if self.adapters_enabled and hasattr(self.base_layer.weight, "dither"):
            weight = self.merged_weight()
            return call_merged(self.base_layer, weight, self._update, x, *args, **kwargs)
        output, bias = self.base_layer(x, *args, **kwargs)
        if self.adapters_enabled:
            output = output + self._update(x)
        return output, bias

    def _update(self, x: Tensor) -> Tensor:
        """(alpha / r) B A x."""
        low = nn.functional.linear(x, self.lora_A.to(x.dtype))
        low = self._communicate(low) if self.tp_size > 1 else low
        return nn.functional.linear(self.scaling * low, self.lora_B.to(x.dtype))

    def _communicate(self, low: Tensor) -> Tensor:
        """A x, from where A left it to where B needs it: what the base layer does with its input
        (column) or its output (row).
        """
        from megatron.core.tensor_parallel import mappings

        if self.row_parallel:  # each rank has a part of the sum
            if self.sequence_parallel:
                return mappings.reduce_scatter_to_sequence_parallel_region(low)
            return mappings.reduce_from_tensor_model_parallel_region(low)
        if self.sequence_parallel:  # each rank has a part of the sequence
            return mappings.gather_from_sequence_parallel_region(low)
        return mappings.copy_to_tensor_model_parallel_region(low)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + (alpha / r) B A of this rank's part, computed in float32 and rounded once to the
        weight's dtype; the same tensor until `forget_merged`.
        """
        if self._merged is None:
            weight = self.base_layer.weight
            dither = getattr(weight, "dither", None)
            self._merged = merged(weight, self.lora_B, self.lora_A, self.scaling, dither)
        return self._merged

    def forget_merged(self) -> None:
        """A or B has changed."""
        self._merged = None


def call_merged(
    layer: nn.Module, weight: Tensor, update: Callable[[Tensor], Tensor], x: Tensor, *args, **kwargs
) -> tuple[Tensor, Tensor | None]:
    """Returns what Megatron's linear `layer` gives with `weight` in the place of its own: (output,
    bias). The gradient of the output goes to x by `weight`, and to A and B by `update`, which
    computes (alpha / r) B A x.
    """
    output, bias = torch.func.functional_call(layer, {"weight": weight}, (x, *args), kwargs)
    if torch.is_grad_enabled():
        output = StraightThrough.apply(output, update(x.detach()))
    return output, bias


class StraightThrough(torch.autograd.Function):
    """Returns `output` as it is, whose gradient goes to `update` as well, which has its shape: in
    `output` the update is there already, by the weights that it is merged into.
    """

    @staticmethod
    def forward(ctx, output: Tensor, update: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """(name, adapter) of every adapted layer of `model`, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def apply_lora(
    model: nn.Module,
    targets: Collection[str],
    r: int,
    alpha: float,
    seed: int,
    layer_offset: int = 0,
    expert_offset: int = 0,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> None:
    """Freeze `model`, a GPTModel, and put a LoRALinear in the place of every layer named by
    `targets`; ConfigError if one matches no layer. layer_offset, expert_offset: global numbers of
    this rank's first layer and expert, by which an adapter starts the same wherever it lives.
    """
    model.requires_grad_(False)
    matched = set()
    for name, module in list(model.named_modules()):
        parent, _, target = name.rpartition(".")
        if target not in targets:
            continue
        global_name = _shifted(name, "decoder.layers", layer_offset)
        global_name = _shifted(global_name, "local_experts", expert_offset)
        drawn_for = f"{seed}/{global_name.replace('local_experts', 'experts')}"
        name_seed = int.from_bytes(hashlib.sha256(drawn_for.encode()).digest()[:8], "little") >> 1
        is_expert = "local_experts" in name
        adapter = LoRALinear(module, r, alpha, name_seed, is_expert, tp_rank, tp_size, global_name)
        setattr(model.get_submodule(parent), target, adapter)
        matched.add(target)
    if empty := set(targets) - matched:
        raise ConfigError(
            f"lora_target_modules: {', '.join(sorted(empty))} matches no layer of this model"
        )


def _shifted(name: str, parent: str, offset: int) -> str:
    """
    >>> _shifted("decoder.layers.1.mlp", "decoder.layers", 4)
    'decoder.layers.5.mlp'
    """
    prefix = re.escape(parent)
    return re.sub(rf"({prefix})\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) + offset}", name, count=1)


@contextlib.contextmanager
def adapters_disabled(*chunks: nn.Module) -> Iterator[None]:
    """Inside, the layers of a model that have `adapters_enabled` compute what the base model
    computes.
    """
    layers = []
    for chunk in chunks:
        layers += [layer for layer in chunk.modules() if hasattr(layer, "adapters_enabled")]
    for layer in layers:
        layer.adapters_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapters_enabled = True
