"""Routing replay (docs/routing_replay.md) in vllm-ascend: what its routers choose, in its model
runner's order.
"""

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed import get_dp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm_ascend.ops import common_fused_moe

from mindspeed_qerl.routing.recorder import RouteRecorder
from mindspeed_qerl.routing.routes import Routers


def captured_rows() -> int | None:
    """Returns the rows of the decode graph that this pass captures; None if it captures none."""
    context = get_forward_context()
    return context.batch_descriptor.num_tokens if context.capturing else None


class AscendRecorder(RouteRecorder):
    """A recorder that is told what every router of vllm-ascend's `model` chooses.

    A router chooses after `prepare` has padded the rows, shared them out among tensor parallel
    ranks, or gathered those of other engines
    (vllm_ascend/ops/moe/fused_moe_prepare_and_finalize.py). So once a forward pass the rows'
    numbers go through the same `prepare`, and say which row is whose.

    Attributes:
        layer: that chooses. rows: int32 [rows after `prepare`, 2], engine and row, from 1; 0 is
            padding.
        captured: by size of a decode graph, the rows that it computes, and what its layers choose.
    """

    def __init__(self, runner: Any, routers: Routers, max_len: int, model: torch.nn.Module):
        super().__init__(runner, routers, max_len)
        self.tp_group = get_tp_group()
        self.engine = get_dp_group().rank_in_group
        self.layer = -1
        self.rows = torch.empty(0)
        self.captured = {}
        for name, module in model.named_modules():
            if isinstance(module, common_fused_moe.AscendFusedMoE):
                layer = int(re.search(r"\blayers\.(\d+)\.", name)[1])
                module.forward_impl = partial(self._forward, module, layer, module.forward_impl)
        common_fused_moe.select_experts = partial(self._select, common_fused_moe.select_experts)

    def _forward(self, module, layer, forward, hidden_states, router_logits):
        """A layer's `forward_impl`. A pass that only keeps other engines company takes part in the
        exchange, too.
        """
        size = captured_rows()
        if layer == self.routers.layers[0] and (size or self.is_recording):
            numbers = self._numbers(module, hidden_states)
            if size:
                self.captured[size] = numbers, {}
            else:
                self.rows = numbers
        self.layer = layer
        return forward(hidden_states, router_logits)

    def _numbers(self, module: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        context = get_forward_context()
        rows = len(hidden_states)
        first = 1
        if context.sp_enabled:  # they are shared out already
            first += self.tp_group.rank_in_group * rows
        numbers = torch.arange(first, first + rows, dtype=torch.int32, device=hidden_states.device)
        numbers = torch.stack([torch.full_like(numbers, 1 + self.engine), numbers], dim=1)
        return context.moe_comm_method.prepare(
            hidden_states=numbers,
            router_logits=numbers,
            replace_allreduce=context.sp_enabled,
            enable_shared_expert_dp=module.enable_shared_expert_dp,
        )[0]

    def _select(self, select, *arguments, **more):
        weights, ids = select(*arguments, **more)
        if size := captured_rows():  # each replay computes them again, in the same memory
            self.captured[size][1][self.layer] = ids.to(self.on_device)
        else:
            self.capture(self.layer, ids)
        return weights, ids

    def replay(self, rows: int) -> None:
        """A decode graph of so many rows is about to be replayed."""
        if self.chosen is not None:
            self.rows, captured = self.captured[rows]
            for layer, ids in captured.items():
                self.capture(layer, ids)

    def own_rows(self, ids: Tensor) -> Tensor:
        """This engine's rows of `ids` [rows, layers, top_k], from all tensor parallel ranks, in the
        runner's order; of one that is missing the same expert over and over (`routes_fault`).
        """
        rows = self.rows
        if self.tp_group.world_size > 1:
            ranks = [None] * self.tp_group.world_size
            dist.all_gather_object(ranks, (rows.cpu(), ids.cpu()), group=self.tp_group.cpu_group)
            rows, ids = map(torch.cat, zip(*ranks))
        own = rows[:, 0] == 1 + self.engine
        rows = rows[own, 1].long() - 1
        ids = ids[own]
        ordered = ids.new_zeros((int(rows.max()) + 1, *ids.shape[1:]))
        ordered[rows] = ids
        return ordered
