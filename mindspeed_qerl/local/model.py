"""A megatron-core GPTModel from a Hugging Face model directory, compared with its config.json: this
rank's part.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.families.tensors import ParameterMapping, mappings
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.recipe.types import Recipe

from .place import Place


class CausalAttention(nn.Module):
    """megatron-core's core_attention slot filled by torch's scaled_dot_product_attention.

    megatron-core's own DotProductAttention builds the full score matrix and a mask on "cuda".
    Padding must be on the right: a causal row never looks at it.
    """

    def __init__(self, **kwargs):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **kwargs):
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return output.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm under megatron-core's signature; its own wrapper (torch_norm.py) refuses
    sequence parallelism, which only matters for a norm that is trained.
    """

    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps)


class SkipPrompts(nn.Module):
    """After the last layer's attention keeps the positions from `first` on: those before it were
    keys and values for them, and nobody reads what experts and vocabulary would make of them. It
    stands where megatron-core's layer has the norm before attention to an encoder
    (transformer_layer.py:472).
    """

    def __init__(self, **kwargs):
        super().__init__()
        self.first = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] -> [s - first, b, h]."""
        return hidden_states[self.first :]


def build_model(
    recipe: Recipe, shape: ModelShape, place: Place
) -> tuple[nn.Module, list[ParameterMapping], range, range]:
    """Build this rank's part of the model of a recipe, of `shape`, and load its weights.

    Returns:
        it, the table that names its parameters, and its layers and its experts by their global
        numbers. Experts are spread whole over tensor x expert parallel ranks, as MindSpeed does
        with moe_tp_extend_ep: for megatron-core that is an expert parallel size of TP x EP and an
        expert tensor parallel size of 1.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layout = recipe.layout
    stage = place.pipeline_group.rank()
    first = stage == 0
    last = stage == layout.pp - 1
    counts = Plan(shape, layout).layers
    before = sum(counts[:stage])
    layers = range(before, before + counts[stage])
    count = shape.num_experts // layout.expert_ranks
    start = count * parallel_state.get_expert_model_parallel_rank()
    experts = range(start, start + count)
    specs = [_layer_spec(shape) for _ in layers]
    if last:
        specs[-1].submodules.pre_cross_attn_layernorm = SkipPrompts
    model = GPTModel(
        config=_transformer_config(recipe, shape, place, len(layers)),
        transformer_layer_spec=TransformerBlockSubmodules(specs, RMSNorm),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    ).to(getattr(torch, recipe.model.dtype))
    # a layer that is computed again passes a gradient on only to an input that needs one
    if recipe.optimizer.recompute_granularity and first:
        model.embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_()
        )
    if shape.rope_scaling:  # GPTModel itself passes on nothing but the factor
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **asdict(shape.rope_scaling))
    if last:
        model.output_layer.register_forward_hook(_gradient_in_memory_order)
    table = mappings(shape, layers, experts, first, last)
    checkpoint = Checkpoint(recipe.model.path)
    check_tensors(checkpoint, shape)
    load_weights(model, table, checkpoint, place.tp_rank, place.tp_size)
    return model, table, layers, experts


def _gradient_in_memory_order(module, inputs, output) -> None:
    """The gradient of the logits [l, n, vocabulary] comes transposed (gpt_model.py:407), and
    torch's matmul would copy the whole output weight for each of the l positions instead of making
    one product.
    """
    if output[0].requires_grad:
        output[0].register_hook(Tensor.contiguous)


def _transformer_config(recipe: Recipe, shape: ModelShape, place: Place, layers: int) -> Any:
    """megatron-core's TransformerConfig of one rank, whose stage has so many layers."""
    from megatron.core.transformer import TransformerConfig

    layout = recipe.layout
    dtype = getattr(torch, recipe.model.dtype)
    return TransformerConfig(
        **family_of(shape).transformer_config(shape),
        **place.sizes,
        # they keep their input only, and are computed again for their gradient
        recompute_granularity=recipe.optimizer.recompute_granularity,
        recompute_method="block",
        recompute_num_layers=min(recipe.optimizer.recompute_num_layers or layers, layers),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        sequence_parallel=layout.tp > 1 and (layout.sequence_parallel or shape.moe),
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the only one for variable lengths, dense models too
        # the loss is divided by the tokens of the whole mini-batch already
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
    )


def _layer_spec(shape: ModelShape):
    """megatron-core's own layer, with our attention core and norms in their places, and the shared
    expert's gate.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    qk_norm = family_of(shape).qk_norm
    spec = get_gpt_layer_local_spec(num_experts=shape.num_experts or None, qk_layernorm=qk_norm)
    layer = spec.submodules
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = CausalAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if shape.shared_expert_intermediate_size:
        layer.mlp.submodules.shared_experts.params["gate"] = True
    return spec


def check_tensors(checkpoint: Checkpoint, shape: ModelShape) -> None:
    """ConfigError unless `checkpoint` is of the model that its config.json describes: a tensor is
    missing, is not called for, or is an output layer of its own beside a tied embedding.
    """
    directory = checkpoint.directory
    expected = set()
    for mapping in mappings(shape, range(shape.num_hidden_layers), range(shape.num_experts)):
        expected |= {*mapping.hf}
    if missing := sorted(expected - set(checkpoint.files)):
        raise ConfigError(
            f"{directory} has no tensor {missing[0]!r}, which config.json calls for "
            f"({len(missing)} are missing). Fetch the whole model, as AutoModelForCausalLM saves it"
            "; without lm_head.weight set tie_word_embeddings"
        )
    for name in sorted(set(checkpoint.files) - expected):
        if name == "lm_head.weight":
            embedding = checkpoint.read("model.embed_tokens.weight")
            if not torch.equal(checkpoint.read(name), embedding):
                raise ConfigError(
                    f"{directory}: config.json has tie_word_embeddings = true, but {name} differs "
                    "from model.embed_tokens.weight: set it to false"
                )
        elif not name.endswith("rotary_emb.inv_freq"):  # which follow from config.json
            raise ConfigError(
                f"{directory}: config.json does not call for the tensor {name!r}: it is of another "
                "model (more layers or experts, a bias?)"
            )


@torch.no_grad()
def load_weights(
    model: nn.Module,
    table: Iterable[ParameterMapping],
    checkpoint: Checkpoint,
    tp_rank: int,
    tp_size: int,
) -> None:
    """Fill every parameter of `model` with this rank's part of `checkpoint`; holds one whole
    Megatron tensor beside the model at a time. ConfigError if one is missing, is quantized or has
    another shape.
    """
    parameters = dict(model.named_parameters())
    for mapping in table:
        parameter = parameters.pop(mapping.megatron)
        parts = [checkpoint.read(name) for name in mapping.hf]
        for name, part in zip(mapping.hf, parts):
            if not part.is_floating_point() or part.itemsize < 2:
                raise ConfigError(
                    f"{checkpoint.directory}: {name} is {part.dtype}; give the model in bfloat16, "
                    "float16 or float32, not quantized"
                )
        value = mapping.merge(parts)
        if mapping.shared:
            value = mapping.shared.shard(value, tp_rank, tp_size)
        if value.shape != parameter.shape:
            raise ConfigError(
                f"{' + '.join(mapping.hf)} in {checkpoint.directory} gives shape "
                f"{tuple(value.shape)}, the model's config.json calls for {tuple(parameter.shape)}"
            )
        parameter.copy_(value)
    assert not parameters, f"no Hugging Face tensor is known for {sorted(parameters)[:5]}"
