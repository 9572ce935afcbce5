"""How many parameters a rank holds. Counts are pairs: all but the experts, and the experts."""

from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.layout.plan import Plan


def layer_weights(shape: ModelShape, tp: int, expert_ranks: int) -> tuple[int, int]:
    """Of one layer on one rank."""
    family = family_of(shape)
    dense, experts = family.other_parameters(shape, tp), 0
    for linear in family.linears(shape):
        if linear.split == "expert":
            experts += linear.inputs * linear.outputs * linear.copies // expert_ranks
        else:
            dense += linear.inputs * linear.outputs // tp
    return dense, experts


def training_weights(plan: Plan, stage: int) -> tuple[int, int]:
    """Of one training rank in pipeline stage `stage` (0 .. PP-1)."""
    layout = plan.layout
    first, last = stage == 0, stage == layout.pp - 1
    return _shard(plan.shape, plan.rows, layout.tp, layout.ep, plan.layers[stage], first, last)


def rollout_weights(plan: Plan) -> tuple[int, int]:
    """Of one vLLM rank."""
    layout, layers = plan.layout, plan.shape.num_hidden_layers
    return _shard(plan.shape, plan.vllm_rows, layout.infer_tp, layout.infer_ep, layers)


def model_parameters(shape: ModelShape) -> int:
    """Of the whole model, with experts."""
    return sum(_shard(shape, shape.vocab_size, 1, 1, shape.num_hidden_layers))


def _shard(
    shape: ModelShape,
    rows: int,
    tp: int,
    ep: int,
    layers: int,
    first: bool = True,
    last: bool = True,
) -> tuple[int, int]:
    """Of `layers` layers; the first bring the embedding, the last the output layer and a norm."""
    dense, experts = layer_weights(shape, tp, tp * ep)
    tables = first + last
    if first and last and shape.tie_word_embeddings:
        tables = 1
    outside_layers = (tables * (rows // tp) + last) * shape.hidden_size
    return dense * layers + outside_layers, experts * layers
