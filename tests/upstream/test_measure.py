"""What measure.py counts: storages that are made while it watches, as long as something holds
them.
"""

import torch
from measure import LiveBytes, held


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
