"""The mixture of experts: weights laid out as on an NPU, computed by the emulated operators, experts spread over all
ranks.

The flow is that of VA's AllGatherCommImpl (ops/moe/moe_comm_method.py, fused_moe_prepare_and_finalize.py): gather the
tokens of the data parallel ranks, compute the experts that live here, sum over the data parallel ranks, keep one's own
tokens, then sum over the tensor parallel ranks.
"""

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor
from vllm.distributed import get_dp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import FusedMoE, UnquantizedFusedMoEMethod


class AscendUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Expert weights transposed once after loading: w13 (E, hidden, 2 ffn), w2 (E, ffn, hidden).

    As in VA ops/common_fused_moe.py:68-88.
    """

    transposed = False

    def process_weights_after_loading(self, layer) -> None:
        if self.transposed:
            return
        self.transposed = True
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(layer, name).data.transpose(1, 2).contiguous()
            setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))

    def apply(
        self, layer, x: Tensor, router_logits: Tensor, top_k: int, renormalize: bool, use_grouped_topk=False,
        expert_map=None,
        custom_routing_function=None, scoring_func="softmax", apply_router_weight_on_input=False, activation="silu",
        **unused,
    ) -> Tensor:  # fmt: skip
        """Sum over the experts of this rank of routing weight * expert(x); x (T, hidden), router_logits (T, all
        experts).

        Raises:
            NotImplementedError: any routing but softmax over all experts, any activation but silu.
        """
        other_routing = (use_grouped_topk or custom_routing_function or scoring_func != "softmax"
                         or apply_router_weight_on_input)
        if other_routing or activation != "silu":
            raise NotImplementedError(
                "the emulated experts know softmax routing over all experts and silu (docs/emulation.md)")
        weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(router_logits, None, top_k)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = experts.long()
        if expert_map is not None:
            experts = expert_map.long()[experts]  # global number -> number on this rank, -1 for another rank's

        num_local = layer.w13_weight.shape[0]
        order = experts.flatten().argsort(stable=True)
        order = order[experts.flatten()[order] >= 0]
        tokens, chosen = order // top_k, experts.flatten()[order]
        sizes = torch.bincount(chosen, minlength=num_local)

        (gate_up,) = torch_npu.npu_grouped_matmul([x[tokens]], [layer.w13_weight], group_list=sizes, group_list_type=1)
        hidden = torch_npu.npu_swiglu(gate_up)
        (down,) = torch_npu.npu_grouped_matmul([hidden], [layer.w2_weight], group_list=sizes, group_list_type=1)
        weighted = down.float() * weights.to(x.dtype).flatten()[order].float()[:, None]
        return torch.zeros(x.shape, dtype=torch.float32).index_add(0, tokens, weighted).to(x.dtype)


class AscendFusedMoE(FusedMoE):
    """FusedMoE with VA's communication (AllGather): vLLM's own leaves data parallel dispatch to a GPU library."""

    def forward_impl(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        num_tokens, dp = hidden_states.shape[0], get_dp_group()
        if self.dp_size > 1:
            longest = int(get_forward_context().dp_metadata.max_tokens_across_dp_cpu)
            padding = (0, 0, 0, longest - num_tokens)
            hidden_states = dp.all_gather(F.pad(hidden_states, padding), 0)
            router_logits = dp.all_gather(F.pad(router_logits, padding), 0)
        result = self.quant_method.apply(
            layer=self, x=hidden_states, router_logits=router_logits, top_k=self.top_k, renormalize=self.renormalize,
            use_grouped_topk=self.use_grouped_topk, expert_map=self.expert_map, scoring_func=self.scoring_func,
            custom_routing_function=self.custom_routing_function, activation=self.activation,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )  # fmt: skip
        if self.dp_size > 1:
            start = dp.rank_in_group * longest
            result = dp.all_reduce(result)[start : start + num_tokens]
        if self.reduce_results and (self.tp_size > 1 or self.ep_size > 1):
            result = self.maybe_all_reduce_tensor_model_parallel(result)
        return result
