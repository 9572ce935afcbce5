"""AQN and the proof of arrival in the worker of the real vllm-ascend, as verl and ms-swift reach it:
`load_weights` of whole tensors, and a batch.
"""

import pytest
from ascend_rollout import Case, run_case

CASES = [
    (Case("qwen3", tp=2, cann="8.3.RC1"), 5, 25),
    (Case("qwen3_moe", tp=2, cann="8.3.RC1"), 2, 69),  # and EP 2
]


@pytest.mark.parametrize("case, norms, tensors", CASES, ids=["tp2", "tp2_ep2"])
def test_three_syncs(case, norms, tensors, upstream, tmp_path):
    """Each rank has the noise of each step once, all of its tensors, and transformers' log-probs."""
    ranks = run_case(case, tmp_path, upstream, "extension_ranks")
    for number, rank in enumerate(ranks):
        assert max(rank["worst"]) < 2e-5 and all(rank["clean"])
        rows = [row for row in rank["rows"] if row["rank"] == number]
        noise = [row for row in rows if row["event"] == "noise"]
        assert [(row["step"], row["aqn/layers"]) for row in noise] == [
            (step, norms) for step in (1, 2, 3)
        ]
        arrivals = [row for row in rows if row["event"] == "arrival"]
        assert [(row["tensors"], row["failures"]) for row in arrivals] == [(tensors, [])] * 3
