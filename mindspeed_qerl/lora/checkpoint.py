"""LoRA adapters out of Megatron checkpoints: whole tensors under Hugging Face's names, whatever
layout trained them.

MindSpeed-LLM writes one file per (tensor, pipeline, expert) rank,
`iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` (training/checkpointing.py; named by
megatron/training/checkpointing.py:get_checkpoint_name). They are read here in a plain Python with
torch: neither Megatron nor MindSpeed is imported, and nothing that a file names is executed.
"""

import json
import pickle
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_qerl.common.files import POSITION, rank_folders, whole_checkpoints
from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.families.tensors import ROW, ParameterMapping, layer_mappings

FILE = "model_optim_rng.pt"
ADAPTER = re.compile(r"decoder\.layers\.(\d+)\.(.+?)(?:\.lora_[AB]\.default\.weight|_lora_[ab])$")
EXPERTS = {  # grouped experts' weights, and LoRA's targets
    "weight1": "linear_fc1",
    "weight2": "linear_fc2",
}
# what unpickling makes as it was
REBUILT = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
}

Pair = tuple[Tensor, Tensor]
Pairs = dict[str, Pair]  # by Hugging Face module
Tensors = dict[str, Tensor]
Shards = dict[tuple[int, int], Tensors]  # by (tensor rank, expert rank)
Table = dict[str, ParameterMapping]  # by Megatron's module
_sizes = attrgetter(
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
)


@dataclass(frozen=True)
class Adapters:
    """A run's adapters after `iteration`: W of every module here becomes W + (alpha / rank) B A.

    weights: (A [rank, in], B [out, rank]) by Hugging Face module name, such as
    "model.layers.0.self_attn.q_proj", in the checkpoint's dtype. Modules that Megatron fuses share
    one A. base: the digest of the weights that were trained (fingerprint.py); run: the id of the
    run; None: not known.
    """

    weights: Pairs
    rank: int
    alpha: float
    iteration: int
    base: str | None = None
    run: str | None = None


def parts(mapping: ParameterMapping, a: Tensor, b: Tensor) -> Pairs:
    """The adapter of each HF module that Megatron fuses in one: they have A in common."""
    return {
        name.removesuffix(".weight"): (a, part)
        for name, part in zip(mapping.hf, mapping.split(b), strict=True)
    }


def load_adapters(
    checkpoint_dir: Path, shape: ModelShape, iteration: int | None = None
) -> Adapters:
    """The adapters in a Megatron checkpoint, by default the last one that is whole;
    shape: of the model that was trained.

    Raises:
        FileNotFoundError: no such iteration (the message lists those there). ValueError: a rank's
            file is missing, the files belong to several layouts, copies of a tensor differ, there
            are no adapters, or some have no name in a Hugging Face model.
    """
    there = whole_checkpoints(checkpoint_dir)
    if not there:
        raise FileNotFoundError(
            f"{checkpoint_dir} holds no whole iter_0000001 or the like: give `checkpoints` of the "
            "run directory"
        )
    if iteration is None:
        iteration = there[-1]
    if iteration not in there:
        raise FileNotFoundError(
            f"{checkpoint_dir} has no iteration {iteration}; there are: {', '.join(map(str, there))}"
        )
    directory = checkpoint_dir / f"iter_{iteration:07d}"
    args, stages = _read_ranks(directory)
    weights: Pairs = {}
    layers_before = 0
    for shards in stages:
        weights |= whole_adapters(shards, args, shape, layers_before)
        layers_before += 1 + max((layer for layer, _ in _modules(shards)), default=-1)
    if not weights:
        raise ValueError(
            f"{directory} holds no LoRA adapters: was the run configured with lora_target_modules?"
        )
    if layers_before != args.num_layers:
        raise ValueError(
            f"{directory} holds adapters of {layers_before} layers, and the model has "
            f"{args.num_layers}: every layer must have some"
        )
    position = directory / POSITION
    owner = json.loads(position.read_text()) if position.is_file() else {}
    return Adapters(
        weights, args.lora_r, args.lora_alpha, iteration, owner.get("base"), owner.get("run")
    )


def table_of_layer(shape: ModelShape, layer: int) -> Table:
    """Returns the mappings of one layer with all of its experts, by Megatron's module."""
    rows = layer_mappings(shape, layer, range(shape.num_experts))
    return {mapping.megatron.removesuffix(".weight"): mapping for mapping in rows}


def whole_adapters(shards: Shards, args: Namespace, shape: ModelShape, layers_before: int) -> Pairs:
    """(A, B) by Hugging Face module name, of one pipeline stage.

    Args:
        shards: its adapters by Megatron's name, by (tensor rank, expert rank). args: Megatron's
            arguments. shape: of the model. layers_before: the layers of the stages before it.

    Raises:
        ValueError: copies of a tensor differ, or an adapter has no name in a Hugging Face model.
    """
    found: Pairs = {}
    for layer, module in sorted(_modules(shards)):
        unshard = _experts if "mlp.experts.weight" in module else _unshard
        table = table_of_layer(shape, layers_before + layer)
        found |= unshard(module, f"decoder.layers.{layer}.{module}", shards, args, table)
    return found


def _modules(shards: Shards) -> set[tuple[int, str]]:
    """(layer, module) of a stage's adapters."""
    return {(int(match[1]), match[2]) for match in map(ADAPTER.match, shards[0, 0]) if match}


def _unshard(module: str, prefix: str, shards: Shards, args: Namespace, table: Table) -> Pairs:
    """The adapters of Megatron's `module`, whose tensors' names begin with `prefix`.

    shards: a pipeline stage's tensors by name, by (tensor rank, expert rank). table: of its layer.
    """
    a, b = (
        [
            replicated([shards[t, e][name] for e in range(args.expert_model_parallel_size)], name)
            for t in range(args.tensor_model_parallel_size)
        ]
        for name in (f"{prefix}.lora_A.default.weight", f"{prefix}.lora_B.default.weight")
    )
    mapping = table.get(module)
    if mapping is None or mapping.shared is None:
        raise ValueError(
            f"an adapter of {module} has no name in a Hugging Face model; known are linear_qkv, "
            "linear_proj, linear_fc1, linear_fc2 of attention, MLP and shared experts, and grouped "
            "experts (moe_grouped_gemm)"
        )
    if mapping.shared == ROW:  # tensor ranks share A by input
        return parts(mapping, ROW.join(a), replicated(b, f"{module}.lora_B"))
    return parts(mapping, replicated(a, f"{module}.lora_A"), mapping.shared.join(b))


def _experts(module: str, prefix: str, shards: Shards, args: Namespace, table: Table) -> Pairs:
    """Joins grouped experts, "mlp.experts.weight1" (h -> 2f, gate and up) or
    "mlp.experts.weight2" (f -> h).

    A rank's tensors are the memory of [experts, in, r] and [experts, r, out]
    (mindspeed_llm/tasks/posttrain/lora/moe/experts.py:437-468, 533-538). Whole experts are dealt to
    the expert ranks, and by those to their tensor ranks (moe_tp_extend_ep:
    mindspeed/core/transformer/moe/moe_feature/tp_extend_ep/moe_layer.py:MSBaseMoELayer).
    """
    target = EXPERTS[module.removeprefix("mlp.experts.")]
    r = args.lora_r
    found: Pairs = {}
    # upstream adds adapters to experts whatever the targets; these were not trained
    if target not in args.lora_target_modules:
        return found
    local = args.num_experts // len(shards)
    ranks = [shards[place] for place in sorted(shards, key=lambda place: place[::-1])]
    a = torch.cat([rank[f"{prefix}_lora_a"].view(local, -1, r) for rank in ranks])
    b = torch.cat([rank[f"{prefix}_lora_b"].view(local, r, -1) for rank in ranks])
    for expert in range(args.num_experts):
        mapping = table[f"mlp.experts.local_experts.{expert}.{target}"]
        found |= parts(mapping, a[expert].T, b[expert].T)  # from x A B to B A x
    return found


def replicated(copies: Sequence[Tensor], name: str) -> Tensor:
    """The tensor that several ranks hold; ValueError if they do not hold the same."""
    if not all(torch.equal(copy, copies[0]) for copy in copies[1:]):
        raise ValueError(
            f"{name}: ranks that should hold the same tensor do not. Either the files are of "
            "several runs, or the run did not keep its ranks in step; there is no telling which "
            "one is right"
        )
    return copies[0]


def _read_ranks(directory: Path) -> tuple[Namespace, list[Shards]]:
    """The run's arguments, and its adapters by pipeline stage."""
    there = sorted(path.parent.name for path in directory.glob(f"mp_rank_*/{FILE}"))
    if not there:
        raise FileNotFoundError(
            f"{directory} has no mp_rank_*/{FILE}: it is not a Megatron checkpoint in torch format"
        )
    args = _read(directory / there[0] / FILE)["args"]
    sizes = _sizes(args)
    numbers = ", ".join(map(str, sizes))
    says = f"{there[0]} is of a run with tensor, pipeline and expert parallel sizes {numbers}"
    if args.num_experts and sizes[0] > 1 and not args.moe_tp_extend_ep:
        raise ValueError(
            f"{directory}: {says} without moe_tp_extend_ep, which splits each expert; such "
            "adapters cannot be read"
        )
    folders = rank_folders(*sizes)
    if odd := sorted({*there} ^ {*folders.values()}):
        raise ValueError(
            f"{directory}: {', '.join(odd)} missing, or of another run: {says}; bring the files of "
            "all nodes of one run together"
        )
    stages: list[Shards] = [{} for _ in range(sizes[1])]
    for (tensor, stage, expert), folder in folders.items():
        checkpoint = _read(directory / folder / FILE)
        if _sizes(checkpoint["args"]) != sizes:
            raise ValueError(
                f"{directory} mixes runs: {says}, and {folder} of one with "
                f"{', '.join(map(str, _sizes(checkpoint['args'])))}; remove one run's files"
            )
        if "model" not in checkpoint:
            raise ValueError(
                f"{directory / folder / FILE} has no 'model', but {', '.join(checkpoint)}: "
                "checkpoints of virtual pipeline stages cannot be read"
            )
        adapters = {
            name: value
            for name, value in checkpoint["model"].items()
            if "lora_" in name and torch.is_tensor(value)
        }
        if strange := [name for name in adapters if not ADAPTER.match(name)]:
            raise ValueError(
                f"{directory / folder / FILE}: {strange[0]} is not an adapter of a decoder layer"
            )
        stages[stage][tensor, expert] = adapters
    return args, stages


def _read(file: Path) -> dict:
    """A rank's file, its tensors mapped: what is unused is never read."""
    try:
        return torch.load(
            file, map_location="cpu", weights_only=False, mmap=True, pickle_module=_Unpickling
        )
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file} cannot be read; it may be cut short: {error}") from error


class _Opaque:
    """In the place of an object of another package, of which nothing is needed: takes what
    unpickling gives it.
    """

    def _take(self, *args, **kwargs) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = _take


class _Unpickling:
    """Stands for the module pickle in torch.load."""

    class Unpickler(pickle.Unpickler):
        """Rebuilds tensors and plain containers, and makes an _Opaque of the rest (enums of
        Megatron, random states).
        """

        def find_class(self, module: str, name: str):
            if (module, name) in REBUILT or (
                module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            ):
                return super().find_class(module, name)
            return _Opaque
