"""The recorder beside a scheduler that is played: what it must have is a function of token,
position and layer.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_qerl.routing.recorder import RouteRecorder
from mindspeed_qerl.routing.routes import Routers, routes_fault

ROUTERS = Routers(
    layers=(0, 2, 5), experts=300, top_k=3
)  # layers 1, 3 and 4 are dense; ids need two bytes


def choice(request, position, layer):
    """Three experts that are no other token's."""
    number = 7 * position + 31 * layer + 101 * sum(map(ord, request))
    return [number % 300, (number + 50) % 300, (number + 123) % 300]


class Runner:
    """What the recorder uses of vLLM's model runner. A request is computed from where it stands."""

    def __init__(self):
        self.computed, self.faults = {}, set()
        self.input_batch = SimpleNamespace(
            req_ids=[], num_computed_tokens_cpu=np.zeros(8, dtype=np.int32)
        )

    def execute_model(self, scheduler_output):
        scheduled = scheduler_output.num_scheduled_tokens
        batch = self.input_batch
        batch.req_ids = sorted(scheduled, reverse=True)  # another order than the scheduler's
        batch.num_computed_tokens_cpu[: len(scheduled)] = [
            self.computed.get(one, 0) for one in batch.req_ids
        ]
        rows = [
            (one, self.computed.get(one, 0) + token)
            for one in batch.req_ids
            for token in range(scheduled[one])
        ]
        self.forward(rows)
        for one, tokens in scheduled.items():
            self.computed[one] = self.computed.get(one, 0) + tokens
        return "result"

    def forward(self, rows, padding=2):
        layers = [layer for layer in ROUTERS.layers if layer not in self.faults]
        for layer in layers:
            ids = [choice(*row, layer) for row in rows] + [[0, 1, 2]] * padding
            if "short" in self.faults:
                ids = ids[:1]
            ids = torch.tensor(ids, dtype=torch.int32)
            self.recorder.capture(layer, ids)
            ids.zero_()  # vLLM may use the memory again
            if "twice" in self.faults:
                self.recorder.capture(layer, ids)


@pytest.fixture
def runner():
    runner = Runner()
    runner.recorder = RouteRecorder(runner, ROUTERS, max_len=16)
    return runner


def output(request, prompt, answers):
    return SimpleNamespace(
        request_id=request,
        prompt_token_ids=list(range(prompt)),
        outputs=[
            SimpleNamespace(index=index, token_ids=list(range(tokens)))
            for index, tokens in enumerate(answers)
        ],
    )


def run(runner, *passes):
    for scheduled in passes:
        assert runner.execute_model(SimpleNamespace(num_scheduled_tokens=scheduled)) == "result"


def expected(request, tokens):
    return np.array(
        [
            [choice(request, position, layer) for layer in ROUTERS.layers]
            for position in range(tokens)
        ]
    )


def test_rows_are_put_where_they_belong(runner):
    """Two answers to a prompt of 5, one of which comes in chunks, is preempted and computed again,
    and a prompt of its own without an answer of more than one token.
    """
    runner.forward([("profile", 0)])  # nobody asked: before and after
    with runner.recorder.recording():
        runner.forward([("0_a-00000000", 9)])  # a dummy batch between
        run(runner, {"0_a-00000000": 5, "1_a-00000000": 2})
        run(runner, {"0_a-00000000": 1, "1_a-00000000": 3, "b-11111111": 4})
        runner.computed["0_a-00000000"] = (
            0  # preempted: all of it again, with the token that it has sampled
        )
        run(runner, {"1_a-00000000": 1}, {})
        run(runner, {"0_a-00000000": 7})
    runner.forward([("0_a-00000000", 0)])
    first, second = runner.recorder.take([output("a", 5, (3, 2)), output("b", 4, (1,))])
    assert [routes.dtype for routes in (*first, *second)] == [np.uint16] * 3
    np.testing.assert_array_equal(first[0], expected("0_a-00000000", 7))
    np.testing.assert_array_equal(first[1], expected("1_a-00000000", 6))
    np.testing.assert_array_equal(second[0], expected("b-11111111", 4))
    assert "execute_model" not in vars(runner)  # the class's own again
    for routes in (*first, *second):
        assert routes_fault(routes, len(routes), ROUTERS) is None


def test_the_next_recording_knows_nothing_of_the_last(runner):
    with runner.recorder.recording():
        run(runner, {"a-0": 5})
    with runner.recorder.recording():
        pass
    with pytest.raises(
        RuntimeError, match=r"request a, answer 0: no routes for 5 of its 5 tokens, the first at"
    ):
        runner.recorder.take([output("a", 5, (1,))])


def test_a_prompt_of_which_a_part_was_cached_is_named(runner):
    with runner.recorder.recording():
        runner.computed["a-0"] = 3
        run(runner, {"a-0": 4})
    with pytest.raises(
        RuntimeError,
        match=r"no routes for 3 of its 7 tokens, the first at position 0.*prefix cache",
    ):
        runner.recorder.take([output("a", 6, (2,))])


def test_an_answer_without_a_token_has_its_prompts_routes(runner):
    with runner.recorder.recording():
        run(runner, {"a-0": 6})
    assert runner.recorder.take([output("a", 6, (0,))])[0][0].shape == (6, 3, 3)


@pytest.mark.parametrize(
    "fault, message",
    [
        (2, "layer 2 chose no experts in a forward pass of 5 tokens, 2 of 3 layers did"),
        ("short", "routers chose experts for 1 tokens of 5"),
        ("twice", "layer 0 chose experts twice in one forward pass"),
    ],
)
def test_a_router_that_is_not_heard_as_it_should_stops_the_run(runner, fault, message):
    runner.faults.add(fault)
    with pytest.raises(RuntimeError, match=message), runner.recorder.recording():
        run(runner, {"a-0": 5})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda routes: None, "it has no routes"),
        (
            lambda routes: routes[:3],
            r"its routes have the shape \[3, 3, 3\], and 4 tokens in 3 layers with 3 experts a",
        ),
        (lambda routes: routes[:, :2], "they are of another sequence or another model"),
        (
            lambda routes: np.where(routes == routes[1, 2, 0], 300, routes),
            r"layer 5 sends token 1 to an expert that is none of its 300: \[300, ",
        ),
        (
            lambda routes: np.where(np.arange(3) == 1, routes[..., :1], routes),
            "layer 0 sends token 0 to the same expert twice",
        ),
    ],
)
def test_routes_that_cannot_be_are_named(change, message):
    assert re.search(message, routes_fault(change(expected("a", 4)), 4, ROUTERS))
