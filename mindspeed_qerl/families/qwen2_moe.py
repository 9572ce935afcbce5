"""Qwen2-MoE (Qwen1.5-MoE-A2.7B): biases on the projections of queries, keys and values, experts,
and a shared expert with a gate.

MindSpeed-RL has no adaptor for it: Qwen3-MoE's serves, with names for the shared expert. vLLM's
model_executor/models/qwen2_moe.py names it `mlp.shared_expert.*` and its gate
`mlp.shared_expert_gate`; megatron-core's transformer/moe/shared_experts.py keeps the gate as a bare
parameter `gate_weight`.
"""

from mindspeed_qerl.families.base import Adaptor, Conversion, Family
from mindspeed_qerl.families.qwen2 import OPTIONS

SPEC = ("mindspeed_llm.tasks.models.spec.qwen2_moe_spec", "layer_spec")
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    qkv_bias=True,
    experts=True,
    shared_expert=True,
    megatron={"spec": list(SPEC)},
    extra_arguments={"shared_expert_gate": True},
    conversion=Conversion(
        "convert_ckpt.py", "qwen2-moe", ("--moe-grouped-gemm", *OPTIONS, "--spec", *SPEC)
    ),
    adaptor=Adaptor(
        "Qwen3MoeMVWeightAdaptor",
        params_mapping=(
            ("mlp.shared_experts.linear_fc1", "mlp.shared_expert.gate_up_proj"),
            ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
            ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate"),
        ),
        corrections=((".gate_weight.weight", ".gate_weight"),),
    ),
)
