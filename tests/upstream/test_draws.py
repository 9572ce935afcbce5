"""A draw of the noise for each answer or group in the real vllm-ascend on emulated NPUs: log-probs
beside transformers with each answer's own draw, of eight answers, four served at a time.
"""

import pytest
from ascend_rollout import Case, run_case
from test_graphs import SIZES
from test_vllm_ascend import FLOAT32

from mindspeed_qerl.emulation.counts import VARIABLE

# with CANN 8.3, where float32 reads what is cached, and so what was computed before a preemption
CASES = [
    Case("qwen3", cann="8.3.RC1"),
    Case("qwen3", cann="8.3.RC1", graphs=SIZES),
    Case("qwen3_moe", tp=2, cann="8.3.RC1", graphs=SIZES),
    Case("qwen3_moe", dp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen3_moe", dp=2, cann="8.3.RC1", graphs=SIZES),
    Case("qwen3_moe", tp=2, soc="910B", cann="8.3.RC1", chunked=True),
    Case("qwen2", "bfloat16", tp=2, cann="8.3.RC1", graphs=SIZES),
    Case("qwen3", cann="8.3.RC1", graphs=SIZES, draws="group"),
]


def bound(case: Case, rounded: float) -> float:
    """How far log-probs may be from transformers in float32, its bfloat16 being `rounded` away."""
    return FLOAT32 if case.dtype == "float32" else 3 * rounded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_answer_is_of_its_own_draw(case, upstream, models):
    ranks = run_case(case, models, upstream, "draws_ranks")
    for number, rank in enumerate(ranks):
        assert rank["off"] and rank["again"] and rank["off again"]
        assert rank["preempted"]
        # of groups what is shared is computed once
        assert bool(rank["cached"]) == (case.draws == "group")
        assert len(rank["apart"]) == (6 if number // case.tp % 2 else 8)
        assert all(worst < bound(case, rounded) for worst, rounded in rank["apart"])
        # of each answer another's draw would be seen
        assert all(worst > max(0.01, bound(case, rounded)) for worst, rounded in rank["other"])
        # ranks of one tensor parallel group have the same draws
        assert rank["tables"] == ranks[number - number % case.tp]["tables"]
        print(f"\n{case}: {max(rank['apart'])[0]:.1e} nats, another {min(rank['other'])[0]:.1e}")


@pytest.mark.parametrize("graphs", [(), SIZES], ids=["eager", "captured"])
def test_launches_of_a_decode_step(graphs, upstream, models):
    """Two products' worth a norm, in the graph where there is one, and one copy of the index."""
    case = Case("qwen3", cann="8.3.RC1", graphs=graphs, variables={VARIABLE: "1"})
    [rank] = run_case(case, models, upstream, "draws_ranks")
    plain, drawn = rank["launches"]
    more = {name: drawn.get(name, 0) - plain.get(name, 0) for name in plain | drawn}
    more = {name: count for name, count in more.items() if count}
    print(f"\n{case}: {sum(plain.values())} launches, with draws more: {more}")
    of_norms = 0 if graphs else rank["norms"]
    assert more == {"copy_": 1} | ({"index_select": of_norms, "mul": of_norms} if of_norms else {})
