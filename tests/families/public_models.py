"""config.json of public models, written from what their pages document; what changes no model is
left out.

MODELS: those that are built. OTHERS: those that are refused, with words of the refusal. Both in the
form of transformers 4; `newer` gives that of transformers 5.
"""


def qwen2(layers, hidden, width, heads, groups, vocabulary=152064, **more):
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": width,
        "max_position_embeddings": 32768,
        "max_window_layers": layers,
        "model_type": "qwen2",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": vocabulary,
        **more,
    }


def tied(make, *sizes, **more):
    return make(*sizes, tie_word_embeddings=True, **more)


def qwen3(*sizes, **more):
    own = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
    }
    return {**qwen2(*sizes, 151936), **own, **more}


def experts(count, top, width, **more):
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "num_experts": count,
        "num_experts_per_tok": top,
        **more,
    }


def llama(layers, hidden, width, heads, vocabulary, **more):
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": width,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": vocabulary,
        **more,
    }


QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN3_30B = {**qwen3(48, 2048, 6144, 32, 4), **experts(128, 8, 768), **QWEN3_MOE}
LLAMA3 = {
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def llama3(*sizes, factor=8.0, **more):
    rope = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return llama(*sizes, 128256, **LLAMA3, rope_scaling=rope, **more)


# layers, hidden, width, heads, groups
QWEN_7B = 28, 3584, 18944, 28, 4
QWEN_1_5B = 28, 1536, 8960, 12, 2
QWEN3_0_6B = 28, 1024, 3072, 16, 8
LLAMA_7B = 32, 4096, 11008, 32
SMALL = {"vocabulary": 151936, "use_mrope": False}
MODELS = {
    "Qwen2-7B-Instruct": qwen2(*QWEN_7B, sliding_window=131072),
    "Qwen2.5-0.5B": tied(qwen2, 24, 896, 4864, 14, 2, **SMALL),
    "Qwen2.5-1.5B": tied(qwen2, *QWEN_1_5B, **SMALL),
    "Qwen2.5-7B-Instruct": qwen2(*QWEN_7B),
    "Qwen2.5-32B": qwen2(64, 5120, 27648, 40, 8, rms_norm_eps=1e-5),
    "Qwen2.5-72B": qwen2(80, 8192, 29568, 64, 8, rms_norm_eps=1e-5),
    "Qwen2.5-Math-1.5B": qwen2(
        *QWEN_1_5B,
        151936,
        tie_word_embeddings=True,
        rope_theta=10000,
        max_position_embeddings=4096,
        sliding_window=4096,
        use_mrope=False,
    ),
    "Qwen3-0.6B": tied(qwen3, *QWEN3_0_6B),
    "Qwen3-4B": tied(qwen3, 36, 2560, 9728, 32, 8),
    "Qwen3-8B": qwen3(36, 4096, 12288, 32, 8),
    "Qwen3-14B": qwen3(40, 5120, 17408, 40, 8),
    "Qwen3-32B": qwen3(64, 5120, 25600, 64, 8),
    "Qwen3-30B-A3B": QWEN3_30B,
    "Qwen3-30B-A3B-Instruct-2507": {
        **QWEN3_30B,
        "rope_theta": 10000000,
        "max_position_embeddings": 262144,
        "qkv_bias": False,
    },
    "Qwen3-Coder-30B-A3B-Instruct": {
        **QWEN3_30B,
        "intermediate_size": 5472,
        "shared_expert_intermediate_size": 0,
        "qkv_bias": False,
        "use_qk_norm": True,
        "rope_theta": 10000000,
        "max_position_embeddings": 262144,
    },
    "Qwen1.5-MoE-A2.7B-Chat": {
        **qwen2(24, 2048, 5632, 16, 16, 151936, max_position_embeddings=8192, max_window_layers=21),
        **experts(60, 4, 1408, norm_topk_prob=False, shared_expert_intermediate_size=5632),
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
    },
    "Qwen2-57B-A14B-Instruct": {
        **qwen2(*QWEN_7B, 151936),
        "architectures": ["Qwen2MoeForCausalLM"],
        **experts(64, 8, 2560, norm_topk_prob=False, shared_expert_intermediate_size=20480),
        "model_type": "qwen2_moe",
    },
    "Llama-3.1-8B": llama3(32, 4096, 14336, 32),
    "Llama-3.1-70B": llama3(80, 8192, 28672, 64),
    "Llama-3.2-1B": tied(llama3, 16, 2048, 8192, 32, factor=32.0, head_dim=64),
    "Llama-2-7b-hf": llama(
        *LLAMA_7B,
        32000,
        max_position_embeddings=4096,
        num_key_value_heads=32,
        pretraining_tp=1,
        rope_scaling=None,
    ),
    "llama-7b": llama(
        *LLAMA_7B,
        32000,
        architectures=["LLaMAForCausalLM"],
        max_sequence_length=2048,
        rms_norm_eps=1e-06,
    ),
    "SmolLM2-135M-Instruct": llama(
        30,
        576,
        1536,
        9,
        49152,
        **{
            **LLAMA3,
            "num_key_value_heads": 3,
            "rope_theta": 100000,
            "max_position_embeddings": 8192,
        },
        is_llama_config=True,
        rope_interleaved=False,
        rope_scaling=None,
    ),
    "TinyLlama-1.1B-Chat": llama(
        22,
        2048,
        5632,
        32,
        32000,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        attention_bias=False,
        rope_theta=10000.0,
    ),
}
CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
OTHERS = {
    "Qwen2.5-7B-Instruct-1M": (
        qwen2(*QWEN_7B, max_position_embeddings=1010000, dual_chunk_attention_config=CHUNKS),
        "dual_chunk_attention_config is",
    ),
    "Qwen2.5-7B-Instruct, YaRN": (qwen2(*QWEN_7B, rope_scaling=YARN), "rope_type is 'yarn'"),
    "Qwen2-7B with a window": (
        qwen2(*QWEN_7B, use_sliding_window=True, sliding_window=4096, max_window_layers=14),
        "use_sliding_window is True",
    ),
    "a reward model of TRL": (
        qwen2(*QWEN_1_5B, architectures=["Qwen2ForSequenceClassification"]),
        "Qwen2ForSequenceClassification",
    ),
    "Qwen3-Embedding in sentence transformers": (
        qwen3(*QWEN3_0_6B, architectures=["Qwen3Model"]),
        "architectures is ['Qwen3Model']",
    ),
    "gte-Qwen2-1.5B-instruct": (
        qwen2(
            *QWEN_1_5B,
            151646,
            is_causal=False,
            auto_map={
                "AutoModel": "modeling_qwen.Qwen2Model",
                "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM",
            },
        ),
        "is_causal is False",
    ),
    "code of its own": (
        qwen2(*QWEN_1_5B, 151646, auto_map={"AutoModelForCausalLM": "modeling_a.A"}),
        "auto_map names code of the model's own (modeling_a.A)",
    ),
    "Qwen2-VL-7B-Instruct": (
        {
            **qwen2(*QWEN_7B),
            "model_type": "qwen2_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
        "model_type 'qwen2_vl' is an architecture of its own",
    ),
    "a text model cut out of Qwen2-VL": (
        qwen2(*QWEN_7B, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        "mrope",
    ),
    "Qwen3-8B-FP8": (
        qwen3(36, 4096, 12288, 32, 8, quantization_config={"quant_method": "fp8", "fmt": "e4m3"}),
        "quantization_config",
    ),
    "experts in every other layer": (
        {**QWEN3_30B, "decoder_sparse_step": 2},
        "decoder_sparse_step = 2",
    ),
    "a Llama with biases": (llama(*LLAMA_7B, 32000, attention_bias=True), "attention_bias is True"),
    "a Llama with a window": (
        llama(*LLAMA_7B, 32000, sliding_window=4096),
        "sliding_window is 4096",
    ),
    "Mistral-7B-Instruct-v0.3": (
        {
            **llama(32, 4096, 14336, 32, 32768),
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
        },
        "model_type 'mistral' is an architecture of its own",
    ),
}


def newer(config):
    """As transformers 5 writes it: dtype, rope_parameters, num_local_experts."""
    config = {**config, "dtype": config["torch_dtype"], "transformers_version": "5.2.0"}
    scaling = config.pop("rope_scaling", None) or {}
    kind = scaling.get("rope_type") or scaling.get("type", "default")
    config["rope_parameters"] = {
        **scaling,
        "rope_theta": config.pop("rope_theta", 10000.0),
        "rope_type": kind,
    }
    config["rope_parameters"].pop("type", None)
    del config["torch_dtype"]
    if config["model_type"] == "qwen3_moe":
        config["num_local_experts"] = config.pop("num_experts")
    return config


def narrow(config):
    """What make_model of tests/local/conftest.py needs for a small model with the ratios of a dense
    one: heads a KV group, heads to the hidden size, tied or not; with Llama 3's rotary positions in
    short contexts.
    """
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    small = 2 * heads // groups
    hidden = config["hidden_size"] * small * 32 // (heads * width)
    changes = {
        "num_attention_heads": small,
        "num_key_value_heads": 2,
        "hidden_size": hidden,
        "initializer_range": 0.1 * (128 / hidden) ** 0.5,  # logits as large as at 128
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    if config["model_type"] != "qwen2":
        changes["head_dim"] = 32
    if scaling := config.get("rope_scaling"):
        scaling = {**scaling, "original_max_position_embeddings": 64}
        changes["rope_parameters"] = {**scaling, "rope_theta": 1e6}
    return changes
