"""Routes that are given, in megatron-core's own routers: what other implementations got wrong, a
test each.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_qerl.routing.replay import Counts, MicroBatch, RouteReplay, routing_metrics, total
from mindspeed_qerl.routing.routes import Routers

EXPERTS, TOP_K, HIDDEN = 8, 3, 16
ROUTERS = Routers(layers=(1, 3, 4), experts=EXPERTS, top_k=TOP_K)  # layers 0 and 2 are dense


class Stack(nn.Module):
    """Routers of the layers `layers`, counted from 0 over the whole model, and a sum of what they
    weigh.
    """

    def __init__(self, layers=ROUTERS.layers, pre_softmax=False, recompute=()):
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=5,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            num_moe_experts=EXPERTS,
            moe_router_topk=TOP_K,
            moe_router_pre_softmax=pre_softmax,
            moe_router_load_balancing_type="none",
            use_cpu_initialization=True,
            moe_router_dtype="fp32",
            add_bias_linear=False,
        )
        self.routers, self.recompute = nn.ModuleList(TopKRouter(config) for _ in layers), recompute
        self.experts = torch.linspace(-1, 1, EXPERTS)[:, None] * torch.ones(HIDDEN)
        for router, layer in zip(self.routers, layers):
            router.set_layer_number(layer + 1)
            router.weight.data.normal_()

    def forward(self, x):
        """[length, batch, hidden] -> the same."""
        for router in self.routers:

            def layer(x, router=router):
                scores, _ = router(x)
                return x + (scores @ self.experts).view_as(x)

            again = router.layer_number - 1 in self.recompute
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x)
        return x


@pytest.fixture(scope="module", autouse=True)
def cuda_on_cpu():
    from mindspeed_qerl.emulation import cuda_on_cpu

    cuda_on_cpu.install()


def data(length=5, batch=2, seed=0):
    """Input, routes and which are known: all but each sequence's last token and the padding."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, batch, HIDDEN, generator=generator, requires_grad=True)
    routes = torch.rand(length * batch, len(ROUTERS.layers), EXPERTS, generator=generator).argsort(
        -1
    )[..., :TOP_K]
    known = torch.arange(length)[:, None] < torch.tensor([length - 1, length - 3])
    routes[~known.flatten()] = (
        3  # duplicate ids in the padding, which others sent to the dispatcher
    )
    return x, MicroBatch(routes.to(torch.uint8), known.flatten())


def by_hand(stack, x, micro, pre_softmax):
    """The same in plain torch: where nothing is known the largest scores."""
    for router in stack.routers:
        logits = (x @ router.weight.T).flatten(0, 1)
        own = logits.topk(TOP_K).indices
        ids = micro.routes[:, ROUTERS.layers.index(router.layer_number - 1)].long()
        ids = torch.where(micro.known[:, None], ids, own)
        chosen = torch.zeros_like(logits).scatter(1, ids, 1.0)
        scores = (
            logits.softmax(-1) * chosen
            if pre_softmax
            else (logits.masked_fill(chosen == 0, -torch.inf).softmax(-1))
        )
        x = x + (scores @ stack.experts).view_as(x)
    return x


def gradients(stack, x):
    return [x.grad, *(router.weight.grad for router in stack.routers)]


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("recompute", [(), (1,), ROUTERS.layers])
def test_scores_and_gradients_are_those_of_the_live_logits(pre_softmax, recompute):
    """Two micro-batches forward, then backward, as in a pipeline: each is computed again with its
    own routes.
    """
    stack, plain = (
        Stack(pre_softmax=pre_softmax, recompute=recompute),
        Stack(pre_softmax=pre_softmax),
    )
    replay, batches = RouteReplay(stack, ROUTERS), [data(seed=seed) for seed in (1, 2)]
    with replay.training():
        outputs = []
        for x, micro in batches:
            with replay.forward(micro):
                outputs.append(stack(x))
        for output in outputs:
            output.square().sum().backward()
    found = (
        [output.detach() for output in outputs],
        [x.grad for x, _ in batches],
        gradients(stack, x)[1:],
    )
    for (x, micro), output in zip(batches, found[0]):
        x.grad = None
        expected = by_hand(plain, x, micro, pre_softmax)
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
        expected.square().sum().backward()
    for gradient, expected in zip(
        (*found[1], *found[2]), (*(x.grad for x, _ in batches), *gradients(plain, x)[1:])
    ):
        assert (gradient - expected).norm() <= 1e-5 * expected.norm() and expected.norm() > 0.1
    for counts in replay.counts().values():
        assert (counts.replayed, counts.native) == (2 * (4 + 2), 2 * (10 - 6))


def test_a_stage_of_the_pipeline_reads_its_own_layers():
    """Routes of all layers of the model, routers of two of them."""
    x, micro = data()
    stage = Stack(layers=(3, 4))
    replay = RouteReplay(stage, ROUTERS)
    with replay.forward(micro):
        output = stage(x)
    torch.testing.assert_close(output, by_hand(stage, x, micro, False))
    assert set(micro.chosen) == {3, 4}
    for layer, chosen in micro.chosen.items():
        assert torch.equal(
            chosen.sort()[0][micro.known],
            micro.routes[micro.known, ROUTERS.layers.index(layer)].long().sort()[0],
        )


def test_its_own_routes_give_every_bit_of_its_own_result():
    x, micro = data()
    stack = Stack()
    expected = stack(x)
    replay = RouteReplay(stack, ROUTERS)
    own = MicroBatch(micro.routes, torch.zeros_like(micro.known))
    with replay.forward(own):
        assert torch.equal(stack(x), expected)
    # in another order, as vLLM may have them
    routes = torch.stack([own.chosen[layer].flip(-1) for layer in ROUTERS.layers], dim=1)
    with replay.training(), replay.forward(MicroBatch(routes, micro.known)):
        assert torch.equal(stack(x), expected)
    assert all(counts.flipped == 0 < counts.replayed for counts in replay.counts().values())
    assert torch.equal(stack(x), expected)  # and without a micro-batch it chooses by itself


def test_flips_are_counted_where_the_trainer_would_have_chosen_otherwise():
    x, micro = data()
    stack = Stack(layers=(1,))
    own = MicroBatch(micro.routes[:, :1], torch.zeros_like(micro.known))
    replay = RouteReplay(stack, Routers((1,), EXPERTS, TOP_K))
    with replay.forward(own):
        stack(x)
    with replay.training(), replay.forward(MicroBatch(micro.routes[:, :1], micro.known)):
        stack(x)
    flips = sum(
        len(set(ours.tolist()) - set(theirs.tolist()))
        for ours, theirs in zip(micro.routes[micro.known, 0], own.chosen[1][micro.known])
    )
    assert replay.counts() == {1: Counts(replayed=6, native=4, flipped=flips)} and flips > 3


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_tensor_parallel_ranks_decide_for_their_share_of_the_positions(tp_rank):
    x, micro = data(length=6)
    stack = Stack()
    replay, share = RouteReplay(stack, ROUTERS, tp_rank, 2), slice(3 * tp_rank, 3 * tp_rank + 3)
    with replay.training(), replay.forward(micro):
        output = stack(x[share])
    rows = slice(6 * tp_rank, 6 * tp_rank + 6)
    mine = MicroBatch(micro.routes[rows], micro.known[rows])
    torch.testing.assert_close(output, by_hand(stack, x[share], mine, False))
    # where each decides for all (alltoall_seq), it counts its share all the same
    everything = MicroBatch(micro.routes, micro.known)
    counts = replay.counts()
    with replay.training(), replay.forward(everything):
        torch.testing.assert_close(stack(x), by_hand(stack, x, micro, False))
    assert (
        [(c.replayed, c.native) for c in replay.counts().values()]
        == [(c.replayed, c.native) for c in counts.values()]
        == [(int(mine.known.sum()), int((~mine.known).sum()))] * 3
    )


def test_the_model_that_computes_is_another_one():
    """A decoder that was built twice: the routes are in the first."""
    x, micro = data()
    replay = RouteReplay(Stack(), ROUTERS)
    with (
        pytest.raises(RuntimeError, match="layer 1 chose no experts in a forward pass"),
        replay.forward(micro),
    ):
        Stack()(x)


@pytest.mark.parametrize(
    "layers, message",
    [
        ((0, 3), "has a router in layer 0, which by config.json has none"),
        ((1, 1), "layer 1, which by config.json has none or has one already"),
        ((), "no router was found"),
    ],
)
def test_routers_that_the_model_should_not_have(layers, message):
    with pytest.raises(RuntimeError, match=message):
        RouteReplay(Stack(layers=layers), ROUTERS)


def test_routes_of_other_rows_are_refused():
    x, _ = data(length=5)
    _, micro = data(length=6)
    stack = Stack()
    with (
        pytest.raises(
            RuntimeError, match="layer 1 chooses experts for 10 tokens, and there are routes for 12"
        ),
        RouteReplay(stack, ROUTERS).forward(micro),
    ):
        stack(x)


def test_a_layer_computes_as_often_as_it_should():
    x, micro = data()
    stack = Stack(recompute=(3,))
    replay = RouteReplay(stack, ROUTERS)
    with (
        pytest.raises(RuntimeError, match="layer 1 chose experts twice in one forward pass"),
        replay.forward(micro),
    ):
        stack(x), stack(x)
    x, micro = data()
    with (
        pytest.raises(RuntimeError, match=r"were not; routes that are left, by layer: \{3: 1\}"),
        replay.training(),
        replay.forward(micro),
    ):
        stack(x)
    with (
        pytest.raises(RuntimeError, match="layer 1 is computed again, and no routes are left"),
        replay.training(),
    ):
        stack(x)


def test_a_router_that_chooses_in_another_way_is_refused():
    x, micro = data()
    stack = Stack()
    stack.routers[0].routing = lambda logits: (logits.view(-1, EXPERTS).softmax(-1), None)
    with (
        pytest.raises(
            RuntimeError, match="router of layer 1 took the largest of its scores 0 times, not once"
        ),
        RouteReplay(stack, ROUTERS).forward(micro),
    ):
        stack(x)


def test_metrics_of_all_ranks():
    counts = total(
        [
            {1: Counts(10, 2, 3), 3: Counts(10, 2, 0), 4: Counts(10, 2, 6)},
            {layer: Counts(10, 3, 0) for layer in ROUTERS.layers},
        ]
    )
    metrics = routing_metrics(counts, ROUTERS)
    assert metrics["routing/replayed_tokens"] == 20 and metrics["routing/native_tokens"] == 5
    assert metrics["routing/flipped/layer_4"] == 6 / 60
    assert metrics["routing/flipped"] == pytest.approx(np.mean([3 / 60, 0, 6 / 60]))
    counts[3] = Counts(19, 5, 0)
    with pytest.raises(
        RuntimeError, match="layer 3 replayed 19 tokens and left 5 to the trainer, layer 1 20 and 5"
    ):
        routing_metrics(counts, ROUTERS)
    del counts[3]
    with pytest.raises(RuntimeError, match="layer 3 replayed 0 tokens"):
        routing_metrics(counts, ROUTERS)
