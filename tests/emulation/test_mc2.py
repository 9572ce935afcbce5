"""MC2 on gloo ranks: what every rank receives, and the mixture that comes back, against all tokens
of all ranks, one at a time, in float64 (mc2_ranks.py is a rank). bfloat16 is rounded once: 2^-8 of
the result, 1% for float32's error.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.emulation.mc2_ranks import CASES, EXPERTS, H, K
from tests.emulation.mixture import mixture
from tests.emulation.test_operators import EXACT, ONE_ROUNDING, wide


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request, tmp_path_factory):
    """What each rank saved."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    script = Path(__file__).with_name("mc2_ranks.py")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    processes = [subprocess.Popen([sys.executable, script, folder, str(rank), str(world)], env=env,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for rank in range(world)]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
    return [torch.load(folder / str(rank)) for rank in range(world)]


def active(given):
    """bool (BS, K)."""
    mask = given.get("x_active_mask")
    mask = torch.ones(len(given["x"]), dtype=torch.bool) if mask is None else mask
    return (mask[:, None] if mask.dim() == 1 else mask).expand(-1, K).numpy()


def rows_of(everything, me):
    """(rank, token, place in K) of every row that rank `me` gets: by expert, then by rank, then by
    token.
    """
    local = EXPERTS // len(everything)
    return [
        (rank, token, choice)
        for expert in range(me * local, (me + 1) * local)
        for rank, given in enumerate(everything)
        for token, choice in np.argwhere(active(given))
        if given["expert_ids"][token, choice] == expert
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_rows_of_its_experts(ranks, case):
    world, local = len(ranks), EXPERTS // len(ranks)
    everything = [rank[case] for rank in ranks]
    capacity = max(len(given["x"]) for given in everything) * world * min(local, K)
    for me, mine in enumerate(everything):
        rows, dynamic_scales, assist_info, nums, recv_counts, tp_recv_counts, expand_scales = mine[
            "dispatched"
        ]
        order = rows_of(everything, me)
        assert rows.shape == (capacity, H) and rows.dtype == mine["x"].dtype
        assert all(
            torch.equal(row, everything[rank]["x"][token])
            for row, (rank, token, _) in zip(rows, order)
        )
        assert rows[len(order) :].isnan().all() and mine["results"][len(order) :].isnan().all()
        sizes = np.zeros((local, world), dtype=int)
        for rank, token, choice in order:
            sizes[everything[rank]["expert_ids"][token, choice] - me * local, rank] += 1
        counts = sizes.sum(1)
        assert (
            nums.tolist()
            == (counts if mine.get("expert_token_nums_type", 1) else counts.cumsum()).tolist()
        )
        assert recv_counts.tolist() == sizes.cumsum().tolist()
        assert [x.dtype for x in (nums, recv_counts, assist_info)] == [
            torch.int64,
            torch.int32,
            torch.int32,
        ]
        assert [x.shape for x in (assist_info, dynamic_scales, expand_scales, tp_recv_counts)] == [
            (capacity * 128,),
            (capacity,),
            (capacity,),
            (mine.get("tp_world_size", 0),),
        ]


@pytest.mark.parametrize("case", [case for case in CASES if case != "bfloat16"])
def test_the_mixture_comes_back(ranks, case):
    for rank in ranks:
        mine, sent = rank[case], active(rank[case])
        arrays = {name: wide(mine[name]) for name in ("x", "w13", "w2", "weights")}
        expected = mixture(expert_idx=np.where(sent, mine["expert_ids"], -1), **arrays)
        expected[~sent.any(1)] = np.nan
        assert mine["combined"].dtype == mine["x"].dtype
        np.testing.assert_allclose(wide(mine["combined"]), expected, **EXACT)


def test_the_sum_rounds_once(ranks):
    everything = [rank["bfloat16"] for rank in ranks]
    expected = [np.zeros((4, H)) for _ in ranks]
    for me, mine in enumerate(everything):
        for row, (rank, token, choice) in zip(wide(mine["results"]), rows_of(everything, me)):
            expected[rank][token] += wide(everything[rank]["weights"])[token, choice] * row
    for mine, total in zip(everything, expected):
        assert mine["combined"].dtype == torch.bfloat16
        np.testing.assert_allclose(wide(mine["combined"]), total, **ONE_ROUNDING)


def test_the_product_is_summed_and_shared_out(ranks):
    for dtype, bounds in ((torch.float64, dict(rtol=1e-12)), (torch.bfloat16, ONE_ROUNDING)):
        given = [rank["product"]["given"][dtype] for rank in ranks]
        total = sum(wide(one["input"]) @ wide(one["x2"]) for one in given)
        for rows, rank in zip(np.split(total, len(ranks)), ranks):
            assert rank["product"]["back"][dtype].dtype == dtype
            np.testing.assert_allclose(wide(rank["product"]["back"][dtype]), rows, **bounds)


# where one rank disagrees with nobody
ALONE = (
    "ValueError: .*global_bs is 0",
    "ValueError: .*hides tokens",
    "ValueError: .*moe_expert_num is",
    "ValueError: .*m a multiple of world_size",
)


def test_refused_on_every_rank(ranks):
    for rank in ranks:
        for words, error in rank["refusals"].items():
            if len(ranks) == 1 and words in ALONE:
                assert error == "none", words
            elif words != "no room":
                assert re.match(words, error), (words, error)


def test_more_rows_than_room_are_refused(ranks):
    """Every token has expert 0 twice, which CANN forbids, and a rank one expert: A is BS for each
    rank.
    """
    first, bs = ranks[0]["refusals"]["no room"], 4 * len(ranks)
    assert f"{2 * bs} rows came for expand_x of {bs}: some tokens have an expert twice" in first
    assert all(rank["refusals"]["no room"] == "none" for rank in ranks[1:])
