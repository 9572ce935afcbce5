"""Decoding with graphs in the real vllm-ascend on emulated NPUs: beside the same steps without graphs,
bit for bit, and beside transformers; through MindSpeed-RL's syncs; planted faults; and what
upstream's own flow does.
"""

import json
from itertools import chain

import pytest
from ascend_rollout import Case, run_case
from rehearsal import PACKED, finished, make_config, run_module
from test_vllm_ascend import FLOAT32

SERVED = [
    Case("qwen2", "bfloat16", tp=2),
    Case("qwen2", cann="8.3.RC1", nz=1),
    Case("qwen3", tp=4),
    Case("qwen3", "bfloat16", soc="910B", cann="8.3.RC1"),
    Case("qwen3_moe"),
    Case("qwen3_moe", tp=2, cann="8.3.RC1"),
    Case("qwen3_moe", "bfloat16", tp=2, dp=2, nz=1),
    Case("qwen3_moe", dp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen2_moe", tp=2, soc="910B"),
    Case("qwen2_moe", "bfloat16", dp=4, cann="8.3.RC1"),
]
SIZES = (4, 2, 1)
# of the faults below, what must be said
MOVED, DIFFERS = "lie elsewhere than when they were captured", "more than rounding"
SAID = {
    **dict.fromkeys(
        [
            "repointed_weight",
            "another_norm",
            "new_parameter",
            "another_cache",
            "another_table",
            "another_input",
            "another_slot_mapping",
        ],
        MOVED,
    ),
    "stale_copy": DIFFERS,
    "old_lengths": DIFFERS,
    "size_that_was_not_captured": "capturing",
}


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_graphs_answer_as_the_same_steps_without_and_as_transformers(case, upstream, models):
    case = Case(**{**vars(case), "graphs": SIZES})
    for rank in run_case(case, models, upstream, "graphs_ranks"):
        answers = []
        for name, found in rank["noise"].items():
            distance, rounded = found["beside"]
            print(f"\n{case} {name}: {distance:.1e} nats, transformers in bfloat16 {rounded:.1e}")
            assert found["same"], name
            assert found["difference"] == 0
            assert distance < (FLOAT32 if case.dtype == "float32" else 3 * rounded)
            answers.append(found["answers"])
        clean, noisy, other, again = answers
        assert clean == again and clean != noisy != other != clean
        # each size that the steps of two or three sequences, and of one, are filled up to
        assert set(rank["replayed"]) >= {"1", "4"}
        if case.dp > 1:
            captured, eager = rank["prefill"]["captured"], rank["prefill"]["eager"]
            for (tokens, scores), (others, expected) in zip(captured, eager, strict=True):
                # rows that fill a step up are of the steps before, and experts see them
                bound = FLOAT32 if case.dtype == "float32" else 0.1
                assert tokens == others and scores == pytest.approx(expected, abs=bound)
            # on neither engine the fifth prompt's four tokens are a graph's
            steps = rank["prefill"]["steps"]
            assert [4, True, "NONE"] in steps or [4, False, "NONE"] in steps
            assert [4, True, "FULL"] in steps
        planted = SAID if case.moe and case.tp == case.dp == 1 else {}
        stopped = rank.get("faults", {})
        assert stopped.keys() == planted.keys()
        for name, said in stopped.items():
            print(name, said)
            assert planted[name] in said


# as docs/quantization.md and docs/routing_replay.md have them
NVFP4 = {"rollout_quantization": {"format": "nvfp4"}}
MXFP4 = {"rollout_quantization": {"format": "mxfp4"}}
REPLAYED = {"algorithm": {"routing_replay": "rollout"}, "rl_config.init_kl_coef": 0.0}
CACHED = {"generate_config.enable_prefix_caching": True}
RUNS = [
    ("qwen2", dict(npus=2, tp=2), MXFP4),
    ("qwen3", dict(npus=2, infer_tp=2), CACHED | {"aqn.draws": "answer"}),
    ("qwen3_moe", dict(npus=2, ep=2, infer_ep=2), REPLAYED),
    ("qwen3_moe", dict(npus=4, tp=2, infer_tp=2, infer_ep=2), REPLAYED | NVFP4 | PACKED),
    ("qwen2_moe", dict(npus=4, ep=4, infer_ep=4), {"aqn.draws": "answer"}),
]


def run(family, layout, changes, folder, upstream, tiny, *fault):
    """Four iterations -> the process, and the lines of graphs_run.py by rank."""
    model, data = tiny(family)
    changes = {
        "generate_config.enforce_eager": False,
        "aqn.num_stages": 4,
        "eval.every": 2,
        **changes,
    }
    config = make_config(
        family, model, data, folder, train_iters=4, samples=4, changes=changes, **layout
    )
    done = run_module("graphs_run", config, upstream, folder, *fault)
    files = sorted(folder.glob("rank*.jsonl"))
    return done, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("family, layout, changes", RUNS, ids=str)
def test_a_run_samples_with_the_weights_and_the_noise_of_its_step(
    family, layout, changes, upstream, tiny, tmp_path
):
    """Every rollout and evaluation as without graphs, bit for bit, offloading between them."""
    done, ranks = run(family, layout, changes, tmp_path, upstream, tiny)
    directory = finished(done, tmp_path / "rehearsal")
    assert directory.status()["step"] == 4
    for lines in ranks:
        asked = [(line["purpose"], line["step"]) for line in lines]
        rollouts = [("rollout", step) for step in range(4)]
        evaluations = [("evaluation", step) for step in (0, 2, 4)]
        assert sorted(asked) == sorted(rollouts + evaluations)
        assert {line["sigma"] for line in lines if line["purpose"] == "evaluation"} == {None}
        noise = [line["sigma"] for line in lines if line["purpose"] == "rollout"]
        assert noise[0] == 0 and len(set(noise)) == 4
        for line in lines:
            assert line["same"] and all(line["routes"]), line
            assert line["replayed"] > 5 and line["resets"] == 1
        assert bool(ranks[0][1]["routes"]) == ("algorithm" in changes)
    for lines in zip(*ranks, strict=True):
        own = "aqn.draws" in changes and lines[0]["sigma"]
        draws = set(chain(*(line["draws"] for line in lines)))
        assert draws == set(range(1, 17 if own else 1))  # of sixteen answers


@pytest.mark.parametrize("fault", ["repointed_weight", "stale_graph"])
def test_a_run_whose_graphs_are_stale_stops(fault, upstream, tiny, tmp_path):
    done, ranks = run("qwen3", dict(npus=2), {}, tmp_path, upstream, tiny, fault)
    said = {"repointed_weight": MOVED, "stale_graph": DIFFERS}[fault]
    assert done.returncode == 1 and said in done.stderr
    assert all(len(lines) == 2 for lines in ranks)
