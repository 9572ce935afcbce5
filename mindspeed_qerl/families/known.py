"""The families themselves: what sets each apart from the others."""

from .base import Conversion, Family

OPTIONS = ("--use-mcore-models", "--model-type", "GPT", "--add-qkv-bias", "--params-dtype", "bf16")
SPEC = ("mindspeed_llm.tasks.models.spec.qwen2_moe_spec", "layer_spec")
KNOWN = (
    # Qwen2 and Qwen2.5, dense: biases on the projections of queries, keys and values. MindSpeed-LLM
    # converts them as Llama 2 with biases.
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        qkv_bias=True,
        conversion=Conversion("convert_ckpt.py", "llama2", OPTIONS),
        adaptor="QwenMVWeightAdaptor",
    ),
    # Qwen3, dense: normalized queries and keys, heads of any width.
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        qk_norm=True,
        own_head_dim=True,
        conversion=Conversion("convert_ckpt_v2.py", "qwen3"),
        adaptor="Qwen3MvWeightAdaptor",
    ),
    # Qwen2-MoE (Qwen1.5-MoE-A2.7B): biases on the projections of queries, keys and values, experts,
    # and a shared expert with a gate. MindSpeed-RL has no adaptor for it: Qwen3-MoE's serves, with
    # names for the shared expert. vLLM's model_executor/models/qwen2_moe.py names it
    # `mlp.shared_expert.*` and its gate `mlp.shared_expert_gate`; megatron-core's
    # transformer/moe/shared_experts.py keeps the gate as a bare parameter `gate_weight`.
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qkv_bias=True,
        experts=True,
        shared_expert=True,
        megatron={"spec": list(SPEC)},
        conversion=Conversion(
            "convert_ckpt.py", "qwen2-moe", ("--moe-grouped-gemm", *OPTIONS, "--spec", *SPEC)
        ),
        adaptor="Qwen3MoeMVWeightAdaptor",
        params_mapping=(
            ("mlp.shared_experts.linear_fc1", "mlp.shared_expert.gate_up_proj"),
            ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
            ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate"),
        ),
    ),
    # Qwen3-MoE: normalized queries and keys, heads of any width, experts in every layer.
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        own_head_dim=True,
        experts=True,
        conversion=Conversion("convert_ckpt_v2.py", "qwen3-moe", ("--moe-grouped-gemm",)),
        adaptor="Qwen3MoeMVWeightAdaptor",
    ),
    # Llama, dense: no biases, plain queries and keys; rotary positions of Llama 3 from 3.1 on.
    Family(
        "llama",
        "LlamaForCausalLM",
        own_head_dim=True,
        conversion=Conversion("convert_ckpt.py", "llama2", (*OPTIONS[:3], *OPTIONS[4:])),
        adaptor="QwenMVWeightAdaptor",
    ),
)
