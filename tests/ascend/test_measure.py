"""What a rehearsal counts: storages that are made while it watches, as long as something holds
them.
"""

from types import SimpleNamespace

import torch

from mindspeed_qerl.ascend.measure import LiveBytes, Meter, held


def test_the_peak_is_what_lives_at_once():
    weight, a, b = torch.ones(100, 40).bfloat16(), torch.ones(2, 40), torch.ones(100, 2)
    with LiveBytes() as live:
        merged = torch.addmm(weight.float(), b, a).to(
            weight.dtype
        )  # W and W + BA in float32, and none of them after
        assert live.peak == 2 * 4000 * 4 and live.now == 4000 * 2
        halves = [half.contiguous() for half in merged.chunk(2, dim=1)]
        assert live.now == 2 * 4000 * 2
        del merged, halves
        assert live.now == 0
        weight.view(-1)[:10].detach().add_(1)  # of what was there before
        assert live.now == 0 and live.peak == 2 * 4000 * 4


def test_a_storage_is_held_once_and_not_when_it_is_empty():
    whole = torch.zeros(100)
    assert held([whole, whole[:10], whole.view(10, 10)]) == 400
    whole.untyped_storage().resize_(0)
    assert held([whole]) == 0


class Offloader:
    """As upstream's, of one chunk: what is trained lies in Megatron's buffers, the base does not."""

    def __init__(self):
        self.buffer = SimpleNamespace(
            param_data=torch.zeros(30, dtype=torch.bfloat16), grad_data=torch.zeros(30)
        )
        parameters = [
            torch.nn.Parameter(torch.zeros(500)),
            torch.nn.Parameter(self.buffer.param_data),
        ]
        self.model = [
            SimpleNamespace(
                buffers=[self.buffer],
                expert_parallel_buffers=[],
                parameters=lambda: iter(parameters),
            )
        ]
        masters = [torch.zeros(30)]
        state = {"step": 1, "exp_avg": torch.zeros(30), "exp_avg_sq": torch.zeros(30)}
        self.optimizer = [
            SimpleNamespace(
                optimizer=SimpleNamespace(
                    param_groups=[{"params": masters}], state={masters[0]: state}
                )
            )
        ]

    def offload_param(self):
        self.buffer.param_data.untyped_storage().resize_(0)

    def onload_param(self):
        self.buffer.param_data.untyped_storage().resize_(60)

    def offload_grad(self):
        self.buffer.grad_data.untyped_storage().resize_(0)

    onload_grad = offload_optimizer = lambda self: None


def test_what_is_offloaded_what_comes_back_and_what_stays():
    offloader, buffers = Offloader(), []
    container = SimpleNamespace(get_infer_params=lambda: len([torch.zeros(7), torch.zeros(3)]))
    manager = SimpleNamespace(
        vllm_weight_container=container, onload_infer_params=lambda: buffers.append(torch.zeros(25))
    )
    quantized = SimpleNamespace(
        quantize=lambda: None, copies=lambda: [torch.zeros(9, dtype=torch.int8)]
    )
    meter = Meter(offloader, manager, SimpleNamespace(init_cache_engine=None, quantized=quantized))
    for _ in range(2):
        offloader.offload_param()
        offloader.offload_param()  # twice, as upstream does after an evaluation
        offloader.onload_param()
        offloader.offload_grad()
        offloader.onload_grad()
        offloader.offload_optimizer()
        manager.onload_infer_params()
        assert container.get_infer_params() == 2
        quantized.quantize()
    assert meter.found == {
        "adapters": 60,
        "adapters, back": 60,
        "gradients": 120,
        "gradients, back": 0,
        "AdamW": 3 * 120,
        "frozen base": 2000,
        "vLLM's weights": 100,
        "sync buffers": 40,
        "int8 copies": 9,
    }
