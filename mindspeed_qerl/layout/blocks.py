"""Which models and layouts the blocks of quantised rollouts fill (docs/quantization.md)."""

from collections.abc import Collection, Iterator

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.families import ModelShape

BLOCKS = {
    "mxfp8": 32,
    "mxfp4": 32,
    "nvfp4": 16,
}  # inputs that share a scale (quantization/formats.py)
PADDED = {"fp8": 128}  # the same; the last block of a whole tensor may be shorter
# Of layers whose inputs tensor parallel ranks share: o_proj, and each down_proj.
SHARED_INPUTS = (
    "num_attention_heads x head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def unfilled(format: str, shape: ModelShape, tp: int, shared: Collection[str]) -> Iterator[Fault]:
    """Faults of a format with a model whose layers its blocks do not fill.

    Args:
        tp: the engine's tensor parallel size. shared: the inputs of which each rank rounds its own
            part.
    """
    key = "rollout_quantization.format"
    if (block := (BLOCKS | PADDED).get(format)) is None:
        return
    for name in ("hidden_size", *SHARED_INPUTS):
        width = (
            shape.num_attention_heads * shape.head_dim
            if name == SHARED_INPUTS[0]
            else getattr(shape, name)
        )
        if width % block and format in BLOCKS:
            message = (
                f"{key} = {format!r}: the model's {name} = {width} is no multiple of its blocks of "
                f"{block} inputs; int8_w8a8 and fp8 take any width"
            )
        elif name in shared and tp > 1 and width % (block * tp):
            message = (
                f"{key} = {format!r} with generate_config.infer_tensor_parallel_size = {tp}: a "
                f"rank's part of the model's {name} = {width} is no multiple of its blocks of "
                f"{block} inputs; set a smaller size"
            )
        else:
            continue
        yield Fault("unsupported", message, key)
