"""A megatron-core GPTModel from a Hugging Face config, with the adapters on."""

from pathlib import Path

import torch
from torch import nn

from mindspeed_qerl.config import ConfigError, unknown
from mindspeed_qerl.local.settings import LOCAL_MODELS
from mindspeed_qerl.local.weights import Checkpoint, Mapping, load_weights, qwen3_moe_mappings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_hf_config(directory: str | Path):
    """transformers' config of a model directory; ConfigError if there is none or its family is not supported."""
    from transformers import AutoConfig

    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(f"model directory {directory} has no config.json")
    config = AutoConfig.from_pretrained(directory)
    if config.model_type not in LOCAL_MODELS:
        raise ConfigError(f"{directory}: " + unknown("model_type for the local engine", config.model_type, LOCAL_MODELS))
    for key, only, value in (("attention_bias", False, config.attention_bias), ("hidden_act", "silu", config.hidden_act),
                             ("use_sliding_window", False, config.use_sliding_window), ("mlp_only_layers", [], config.mlp_only_layers),
                             ("decoder_sparse_step", 1, config.decoder_sparse_step),
                             ("rope_type", "default", config.rope_parameters.get("rope_type", "default"))):
        if value != only:
            raise ConfigError(f"{directory}: {key} is {value!r}; the local engine builds Qwen3-MoE with {only!r} only")
    return config


class CausalAttention(nn.Module):
    """megatron-core's core_attention slot filled by torch's scaled_dot_product_attention.

    megatron-core's own DotProductAttention builds the full score matrix and a mask on "cuda". Padding must be on the right:
    a causal row never looks at it.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()

    def forward(self, query, key, value, attention_mask, **kwargs):
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


def local_experts(num_experts: int) -> range:
    """Global ids of the experts this rank holds."""
    from megatron.core import parallel_state

    per_rank = num_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * per_rank
    return range(first, first + per_rank)


def build_model(model_dir: str | Path, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Mapping], range]:
    """Build the GPTModel of `model_dir` and load this rank's weights into it.

    megatron-core's parallel state must be initialised; this rank's experts follow from its expert-parallel rank.

    Returns:
        (model, the table that names its parameters, this rank's global expert ids)
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = read_hf_config(model_dir)
    experts = local_experts(config.num_experts)
    transformer_config = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.moe_intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=config.num_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_pre_softmax=not config.norm_topk_prob,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=config.num_experts, moe_grouped_gemm=False, qk_layernorm=True,
                                    normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        config=transformer_config,
        transformer_layer_spec=spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        parallel_output=False,
    ).to(dtype)
    table = qwen3_moe_mappings(config, experts)
    load_weights(model, table, Checkpoint(model_dir))
    return model, table, experts
