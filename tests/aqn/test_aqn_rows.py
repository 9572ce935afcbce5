"""A draw for each answer or group: which row of a batch has which weight, by a stand-in for vLLM's
model runner (tests/local/test_rollout.py has the real one).
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mindspeed_qerl.aqn.injector import NoiseInjector, standard_normal
from mindspeed_qerl.aqn.rows import TAG
from mindspeed_qerl.aqn.schedule import NoiseLevel

HIDDEN, SIGMA = 16, 0.1
ON = NoiseLevel(step=4, stage=1, sigma=SIGMA)


class Runner:
    """A batch of at most three requests and ten tokens; requests stay known while they are
    preempted.
    """

    max_num_reqs, max_num_tokens = 3, 10

    def __init__(self, model):
        self.model = model
        self.requests, self.input_batch = {}, SimpleNamespace(req_ids=[])

    def add(self, name, draw):
        params = SimpleNamespace(extra_args={TAG: draw} if draw else None)
        self.requests[name] = SimpleNamespace(sampling_params=params)

    def _prepare_inputs(self, scheduled):
        return "prepared"

    def _dummy_run(self, tokens):
        return self.model(torch.ones(tokens, HIDDEN))

    def step(self, padding=0, **tokens):
        """Normed ones of a step, with as many tokens of each request, in this order."""
        self.input_batch.req_ids = list(tokens)
        assert self._prepare_inputs(SimpleNamespace(num_scheduled_tokens=tokens)) == "prepared"
        return self.model(torch.ones(sum(tokens.values()) + padding, HIDDEN))


@pytest.fixture
def served():
    norm = nn.RMSNorm(HIDDEN, eps=0.0)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(norm)
    runner = Runner(model)
    for draw, name in enumerate("abcde", 1):
        runner.add(name, draw)
    injector = NoiseInjector(model, "*", seed=7, draws="answer", runner=runner)
    return runner, injector, norm.weight.detach().clone()


def drawn(clean, draw):
    return clean + SIGMA * standard_normal(7, ON.step, f"0.weight/{draw}", [HIDDEN])


def test_rows_have_the_weights_of_their_requests(served):
    """Ones are normed to ones: what comes out are the weights. Requests come, are preempted, leave
    and return in other places; more draws than the table has places.
    """
    runner, injector, clean = served
    report = injector.apply(ON)
    assert report.measured_std == (drawn(clean, 1) - clean).double().std(correction=0).item()
    table, index = injector.rows.tables[0], injector.rows.index
    kept = table.data_ptr(), index.data_ptr()
    asked, noisy = [], injector.rows.noisy[0]
    injector.rows.noisy = [lambda draw: asked.append(draw) or noisy(draw)]
    for tokens in (
        dict(a=3, b=1),
        dict(b=1, a=1, c=4),
        dict(c=1, a=1),
        dict(d=5, c=1, a=1),
        dict(e=2, b=2, d=1),
        dict(a=1, e=1),
    ):
        wanted = [drawn(clean, ord(name) - 96) for name, n in tokens.items() for _ in range(n)]
        wanted += 2 * [torch.ones(HIDDEN)]  # padding
        assert torch.equal(runner.step(padding=2, **tokens), torch.stack(wanted))
    assert kept == (table.data_ptr(), index.data_ptr()) and len(table) == 4
    # one that comes back is drawn again, not one that runs on
    assert asked == [1, 2, 3, 4, 2, 5, 1]
    injector.remove()
    assert torch.equal(runner.step(a=2), clean.expand(2, -1))
    assert not runner.model[0]._forward_hooks


def test_products_that_stay_change_no_bit_without_noise(served):
    runner, _, clean = served
    stays = NoiseInjector(runner.model, "*", seed=7, draws="group", runner=runner, stays=True)
    assert torch.equal(runner.step(a=3), clean.expand(3, -1))
    stays.apply(ON)
    assert torch.equal(runner.step(b=1)[0], drawn(clean, 2))
    stays.remove()
    assert torch.equal(runner.step(b=1)[0], clean) and runner.model[0]._forward_hooks


def test_norms_of_heads(served):
    runner, injector, clean = served
    injector.apply(ON)
    runner.step(b=1, a=1)
    by_head = runner.model(torch.ones(2, 5, HIDDEN))
    wanted = torch.stack([drawn(clean, 2), drawn(clean, 1)])
    assert torch.equal(by_head, wanted[:, None].expand(2, 5, HIDDEN))


def test_a_request_without_a_draw_is_refused(served):
    runner, injector, _ = served
    runner.add("evaluation", 0)
    runner.step(evaluation=1)  # without noise anybody may ask
    injector.apply(ON)
    with pytest.raises(RuntimeError, match=f"request evaluation names none .{TAG} in extra_args"):
        runner.step(a=1, evaluation=1)


def test_a_pass_of_which_nobody_knows_whose_rows_are_is_refused(served):
    """A part of one that the runner prepared, and one that it did not, after one of no requests."""
    runner, injector, _ = served
    injector.apply(ON)
    runner.step(a=3, b=1)
    with pytest.raises(RuntimeError, match="a pass of 2 rows, having said whose draw 4 have"):
        runner.model(torch.ones(2, HIDDEN))
    assert torch.equal(runner._dummy_run(4), torch.ones(4, HIDDEN))
    with pytest.raises(RuntimeError, match="a pass of 2 rows, having said whose draw none have"):
        runner.model(torch.ones(2, HIDDEN))


@pytest.mark.parametrize(
    "rows, words",
    [
        ((4,), r"1 of 2 norms .* as many as .4.: another kernel reads"),
        ((4, 6), r"2 of 2 norms .* as many as .4, 6.: .* the rows are no tokens"),
        ((4, 20), "a pass of 20 rows, .* draw 4 have: .* are no tokens"),
    ],
)
def test_norms_whose_rows_are_others_are_refused(rows, words):
    norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
    runner = Runner(lambda ones: [norm(torch.ones(n, HIDDEN)) for norm, n in zip(norms, rows)])
    runner.add("a", 1)
    injector = NoiseInjector(norms, "*", seed=7, draws="answer", runner=runner)
    injector.apply(ON)
    with pytest.raises(RuntimeError, match=words):
        runner.step(a=4)
        injector.remove()


def test_a_name_of_no_norm_is_refused(served):
    with pytest.raises(ValueError, match="matches no norm"):
        NoiseInjector(served[0].model, "q*", seed=7, draws="answer", runner=served[0])
