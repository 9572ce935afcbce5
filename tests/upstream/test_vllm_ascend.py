"""The real vllm-ascend on the emulated NPU beside transformers: log-probs of the tokens it samples,
clean and with noise on the norms, on every path that its selectors choose.
"""

import pytest
from ascend_rollout import FLASHCOMM, PREFETCH, Case, run_case

CASES = [
    Case("qwen2", cann="8.3.RC1", nz=1),
    Case("qwen2", "bfloat16", tp=2, soc="910B"),
    Case("qwen3", "bfloat16", cann="8.3.RC1", nz=1),
    Case("qwen3", soc="910B", cann="8.3.RC1", chunked=True),
    Case("qwen3", "bfloat16", tp=2, variables=PREFETCH),
    Case("qwen3", "bfloat16", tp=2, cann="8.3.RC1", variables=FLASHCOMM),
    Case("qwen3_moe", tp=2, cann="8.3.RC1"),
    Case("qwen3_moe", dp=2, nz=1),
    Case("qwen3_moe", tp=2, soc="910B", nz=1),
    Case("qwen3_moe", dp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen3_moe", "bfloat16", tp=2, dp=2, cann="8.3.RC1", nz=1),
    Case("qwen3_moe", tp=2, cann="8.3.RC1", variables=FLASHCOMM),
    Case("qwen3_moe", tp=2, soc="910B", cann="8.3.RC1", chunked=True),
    Case("qwen2_moe", tp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen2_moe", "bfloat16", dp=4, nz=1),
]
# the shared expert's parts: rule shared_expert_is_summed
UNSUMMED = Case("qwen2_moe", tp=2, cann="8.3.RC1")
FLOAT32 = 2e-5  # log-probs of a hundred products each, rounded on their way through two layers
# no runner of torchair's graphs, no ACL graph, nothing compiled
EAGER = ["NPUModelRunner", False, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logprobs_and_noise_are_those_of_transformers(case, upstream, models):
    ranks = run_case(case, models, upstream, "noise_ranks")
    for rank in ranks:
        assert rank["package"] == str(upstream / "vllm-ascend" / "vllm_ascend" / "__init__.py")
        assert "AscendRMSNorm" in rank["classes"] and "RMSNorm" not in rank["classes"]
        for worst, own in (rank["clean"], rank["noisy"]):
            # two computations in bfloat16, and transformers' own distance from float32
            assert worst < (FLOAT32 if case.dtype == "float32" else 3 * own)
        assert rank["unmatched"] > 2 * rank["noisy"][0]  # from transformers without the noise
        assert rank["clean_again"] and rank["graphs"] == EAGER
        assert operators(case) <= set(rank["operators"])
        assert (rank["cached"] >= 128) == bool(case.shared)
        # linear weights with CANN 8.3 in half precision, expert weights always
        half_83 = case.dtype == "bfloat16" and case.cann.startswith("8.3")
        assert bool(rank["in_blocks"]) == bool(case.nz and (half_83 or case.moe))
        # a sync that writes plain bytes into them is seen
        assert rank["bytes_moved"] == bool(rank["in_blocks"])
    if case.moe:
        check_routes(case, ranks)
        # by which tokens go to experts (worker/model_runner_v1.py:1861-1890)
        methods = {"ALLGATHER", "NAIVE_MULTICAST"}
        if case.soc == "910C" and case.tp * case.dp > 1:
            methods = {"MC2", "ALLTOALL"}
        assert set(ranks[0]["methods"]) & methods, ranks[0]["methods"]


def check_routes(case, ranks: list[dict]) -> None:
    """Each rank of each engine has the routes that transformers computes in float32 with the same
    noise, but for near ties; rows that are off by one, or in another layer, are far from them.
    Cached prompts have no routes, and that is said.
    """
    for rank in ranks:
        routes = rank["routes"]
        print(f"\n{case}: routes below the weakest expert of transformers, {routes}")
        assert routes["tokens"] > 50
        assert routes["recorded"] < 1e-4
        if case.dtype == "float32":  # two experts of eight
            assert routes["shifted"] > 0.5 and routes["swapped"] > 0.5
        assert len(routes["faults"]) == bool(case.shared)
        assert all("Were they read from a prefix cache" in fault for fault in routes["faults"])


def operators(case) -> set[str]:
    """What runs only where the variables of `case` are acted upon."""
    if case.variables == FLASHCOMM:  # and its fused product with CANN 8.3
        return {"reduce_scatter", "npu_mm_reduce_scatter_base"}
    return {"npu_prefetch"} if case.variables == PREFETCH else {"npu_rms_norm"}


def test_the_parts_of_a_shared_expert_stay_apart_on_a_910c(upstream, models):
    """Why layout/rules.py refuses it; the day this fails, the rule goes."""
    ranks = run_case(UNSUMMED, models, upstream, "noise_ranks")
    assert min(rank["clean"][0] for rank in ranks) > 0.1
