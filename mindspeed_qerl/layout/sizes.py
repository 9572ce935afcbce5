"""What follows from a model's sizes and a plan's: the parameters that a rank holds, the steps of
decoding that are captured, and the widths that the blocks of quantized rollouts fill.
"""

from collections.abc import Iterable, Iterator

from mindspeed_qerl.common.errors import Fault
from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.families.base import Linear

from .plan import Plan

# tokens of a captured step; vllm-ascend's experts take no more in one (model_runner_v1.py:540)
LARGEST = 512
# infer TP that decode graphs were tried with (tests/upstream/test_graphs.py)
GRAPHS_TP = (1, 2, 4)
# inputs that share a scale (quantization/formats.py)
BLOCKS = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
# Inputs of layers, and those of which tensor parallel ranks round a part each: of o_proj and of each
# down_proj but the experts', which are whole.
WHOLE_INPUTS = ("hidden_size", "moe_intermediate_size")
SHARED_INPUTS = (
    "num_attention_heads x head_dim",
    "intermediate_size",
    "shared_expert_intermediate_size",
)

# ---- parameters ----

Weights = tuple[int, int]  # how many: all but the experts, and the experts


def linear_weights(linears: Iterable[Linear], tp: int, ep: int) -> Weights:
    """Counts the weights of linear layers on one rank; TP x EP ranks share the experts."""
    dense = 0
    experts = 0
    for linear in linears:
        weights = linear.inputs * linear.outputs
        if linear.split == "expert":
            experts += weights * linear.copies // (tp * ep)
        else:
            dense += weights // tp
    return dense, experts


def training_weights(plan: Plan, stage: int) -> Weights:
    """Counts those of one training rank in pipeline stage `stage` (0 .. PP-1)."""
    layout = plan.layout
    first = stage == 0
    last = stage == layout.pp - 1
    return _shard(plan.shape, plan.rows, layout.tp, layout.ep, plan.layers[stage], first, last)


def rollout_weights(plan: Plan) -> Weights:
    """Counts those of one vLLM rank."""
    layout = plan.layout
    layers = plan.shape.num_hidden_layers
    return _shard(plan.shape, plan.vllm_rows, layout.infer_tp, layout.infer_ep, layers)


def model_parameters(shape: ModelShape) -> int:
    """Counts those of the whole model, experts included."""
    return sum(_shard(shape, shape.vocab_size, 1, 1, shape.num_hidden_layers))


def _shard(
    shape: ModelShape,
    rows: int,
    tp: int,
    ep: int,
    layers: int,
    first: bool = True,
    last: bool = True,
) -> Weights:
    """Counts those of `layers` layers; the first bring the embedding, the last the output layer and
    a norm.
    """
    dense, experts = linear_weights(shape.linears, tp, ep)
    dense += family_of(shape).other_parameters(shape, tp)
    tables = first + last
    if first and last and shape.tie_word_embeddings:
        tables = 1
    outside_layers = (tables * (rows // tp) + last) * shape.hidden_size
    return dense * layers + outside_layers, experts * layers


# ---- captured steps and blocks ----


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Sequences of a captured step, ascending; a step of fewer is filled up to the next. Each is a
    graph, memory and seconds at the start, and an empty row costs little: weights are read anyway.

    >>> capture_sizes(96)
    [1, 2, 4, 8, 16, 32, 64, 96]
    """
    largest = min(max_num_seqs, LARGEST)
    powers = [2**n for n in range(largest.bit_length()) if 2**n < largest]
    return [*powers, largest]


def unfilled(format: str, shape: ModelShape, tp: int) -> Iterator[Fault]:
    """Faults of a format with a model whose layers its blocks do not fill, on each of `tp` ranks of
    the rollout engine.
    """
    key = "rollout_quantization.format"
    if format not in BLOCKS:
        return
    of_heads = shape.num_attention_heads * shape.head_dim
    for name in (*WHOLE_INPUTS, *SHARED_INPUTS):
        width = getattr(shape, name, of_heads)
        ranks = tp if name in SHARED_INPUTS else 1
        if width % (BLOCKS[format] * ranks):
            of_ranks = f" over infer TP {tp}" if ranks > 1 else ""
            message = (
                f"{key} = {format!r}: the model's {name} = {width}{of_ranks} is no multiple of its "
                f"blocks of {BLOCKS[format]} inputs; int8_w8a8 and fp8 take any width"
            )
            yield Fault("unsupported", message, key)
