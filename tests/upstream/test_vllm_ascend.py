"""The real vllm-ascend on the emulated NPU beside transformers: log-probs of the tokens it samples, clean and with
noise on the norms, on every path that its selectors choose."""

import pytest
from ascend_rollout import CASES, UNSUMMED, make, run_case

FLOAT32 = 2e-5  # log-probs of a hundred products each, rounded on their way through two layers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logprobs_and_noise_are_those_of_transformers(case, upstream, models):
    ranks = run_case(case, make(case, models), upstream)
    for rank in ranks:
        assert rank["package"] == str(upstream / "vllm-ascend" / "vllm_ascend" / "__init__.py")
        assert "AscendRMSNorm" in rank["classes"] and "RMSNorm" not in rank["classes"]
        for worst, own in ((rank["worst"], rank["own"]), (rank["worst_noisy"], rank["own_noisy"])):
            # two computations in bfloat16, and transformers' own distance from float32
            assert worst < (FLOAT32 if case.dtype == "float32" else 3 * own)
        assert rank["noise_moved"] and rank["clean_again"]
        assert (rank["cached"] >= 128) == bool(case.shared)
        # linear weights with CANN 8.3 in half precision, expert weights always
        half_83 = case.dtype == "bfloat16" and case.cann.startswith("8.3")
        assert bool(rank["in_blocks"]) == bool(case.nz and (half_83 or "moe" in case.family))
        assert rank["bytes_moved"] == bool(rank["in_blocks"])  # a sync that writes plain bytes into them is seen
    if "moe" in case.family:
        assert set(ranks[0]["methods"]) & expected_methods(case), ranks[0]["methods"]


def expected_methods(case) -> set[str]:
    """By which tokens go to experts (worker/model_runner_v1.py:1861-1890)."""
    return {"MC2", "ALLTOALL"} if case.soc == "910C" and case.tp * case.dp > 1 else {"ALLGATHER", "NAIVE_MULTICAST"}


def test_the_parts_of_a_shared_expert_stay_apart_on_a_910c(upstream, models):
    """Why layout/rules.py refuses it; the day this fails, the rule goes."""
    assert min(rank["worst"] for rank in run_case(UNSUMMED, make(UNSUMMED, models), upstream)) > 0.1
