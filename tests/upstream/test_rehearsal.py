"""Whole runs: three GRPO iterations of the real MindSpeed-RL, for each model family and layout."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from rehearsal import (
    LAYERS,
    NOISY_NORMS,
    PACKED,
    finished,
    make_config,
    run_engine,
    run_module,
    terms,
)

from mindspeed_qerl.layout.memory import settings_of, stage_memory
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

RUNS = [
    ("qwen3_moe", dict(npus=4, tp=2, ep=2, infer_ep=4)),
    ("qwen3_moe", dict(npus=2, pp=2, ep=1, infer_ep=2)),
    ("qwen2_moe", dict(npus=2, ep=2, infer_ep=2)),
    ("qwen2", dict(npus=2, tp=2, infer_tp=1)),
]


def lora_parameters(family: str, r: int = 4) -> dict[str, int]:
    """By hand: r (in + out) for each adapted matrix of the tiny models (rehearsal.SHAPE)."""
    h, q, kv, f, e, s = 128, 4 * 32, 2 * 32, 48, 8, 96
    if family == "qwen2_moe":
        up, down = e * r * (h + 2 * f) + r * (h + 2 * s), e * r * (f + h) + r * (s + h)
    elif family == "qwen3_moe":
        up, down = e * r * (h + 2 * f), e * r * (f + h)
    else:
        up, down = r * (h + 2 * 192), r * (192 + h)
    counts = {
        "linear_qkv": r * (h + q + 2 * kv),
        "linear_proj": r * (q + h),
        "linear_fc1": up,
        "linear_fc2": down,
    }
    return {target: LAYERS * count for target, count in counts.items()}


def left_by_vllm() -> set[Path]:
    """Shared memory and sockets on this machine."""
    sockets = (path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket())
    return {*Path("/dev/shm").glob("psm_*"), *sockets}


@pytest.mark.parametrize("family, layout", RUNS, ids=str)
def test_three_iterations(family, layout, upstream, tiny, tmp_path):
    before = left_by_vllm()
    # answers enough that some are right, so that adapters move
    config = make_config(family, *tiny(family), tmp_path, **layout, samples=8)
    result = run_engine(config, upstream, tmp_path)
    run = finished(result, tmp_path / "rehearsal")
    assert left_by_vllm() <= before

    assert run.status()["state"] == "finished" and run.status()["step"] == 3
    assert [row["step"] for row in read_jsonl(run.eval_file)] == [0, 2, 3]
    lora = run.facts()["lora"]
    assert {target: entry["parameters"] for target, entry in lora.items()} == lora_parameters(
        family
    )
    assert {entry["modules"] for entry in lora.values()} == (
        {LAYERS} if family != "qwen2_moe" else {LAYERS, 2 * LAYERS}
    )

    rows = read_jsonl(run.metrics_file)
    assert [row["aqn/sigma"] for row in rows] == [0.0, 0.05, pytest.approx(0.005)]
    assert all(row["aqn/layers"] == NOISY_NORMS[family] for row in rows)
    for row, sigma in zip(rows[1:], (0.05, 0.005)):
        assert row["aqn/measured_std"] == pytest.approx(sigma, rel=0.3)
    assert all(0 <= row["verifier/gsm8k/mean"] <= 1 for row in rows)
    assert len(read_jsonl(run.rollouts_file)) == 3 * 8  # of 32 answers
    assert all(
        0 < row["entropy/mean"] < 5 and 0 < row["mismatch/effective_sample_size"] < 1
        for row in rows
    )
    assert rows[0]["mismatch/k3"] < rows[1]["mismatch/k3"]  # without noise, and with

    assert "LoRA reached the rollout engine" in result.stdout
    assert run.facts()["lora_movement"].keys() == lora.keys()
    for target, entry in run.facts()["lora_movement"].items():
        assert entry["max_error"] <= entry["resolution"] and entry["lost"] < 0.01, target
        assert entry["moved"] == pytest.approx(entry["expected"], rel=0.01), target


def test_a_target_that_does_not_arrive_stops_the_run(upstream, tiny, tmp_path):
    config = make_config("qwen3", *tiny("qwen3"), tmp_path, npus=2, tp=1, infer_tp=2, samples=8)
    done = run_module("lying_sync", config, upstream, tmp_path)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(
        r"the sync after step 1: linear_proj: the rollout engine's weights differ from base \+ "
        r"\(alpha/r\) B A by .* up to 100% of a tensor's move is lost",
        done.stderr,
    ), done.stderr[-3000:]
    [run] = (tmp_path / "rehearsal").iterdir()
    assert RunDirectory.open(run).status()["state"] == "failed"


GRAPHS = {"generate_config.enforce_eager": False}


@pytest.mark.parametrize(
    "family, layout, format, rows",
    [
        ("qwen2_moe", dict(npus=2, tp=2, ep=1, infer_ep=2), "none", PACKED),
        ("qwen3_moe", dict(npus=4, pp=2, ep=2, infer_ep=4), "nvfp4", GRAPHS),
        ("qwen3", dict(npus=2, infer_tp=2), "int8_w8a8", {}),
    ],
    ids=str,
)
def test_a_rehearsal_of_a_config(family, layout, format, rows, upstream, tiny, tmp_path):
    """`rehearsal.enabled` with upstream's own code: the narrow model, its packed rows, what
    Megatron is told of it; what its ranks allocate is what the planner's formulas say.
    """
    model, data = tiny(family)
    config = make_config(
        family,
        model,
        data,
        tmp_path,
        changes={"rollout_quantization": {"format": format}, **rows},
        **layout,
    )
    config["rehearsal"] = dict(
        enabled=True, steps=2, layers="all", max_tokens=8, models=str(tmp_path / "models")
    )
    config["task"]["train_file"] = str(data / "chat" / "train_chat.parquet")
    done = run_module("measure", config, upstream, tmp_path)
    run = finished(done, tmp_path / "rehearsals" / "rehearsal")
    assert run.status()["state"] == "finished" and run.status()["step"] == 2
    assert [row["aqn/sigma"] > 0 for row in read_jsonl(run.metrics_file)] == [False, True]
    assert (
        {entry["modules"] for entry in run.facts()["lora"].values()} == {LAYERS, 2 * LAYERS}
        if family == ("qwen2_moe")
        else {LAYERS}
    )

    recipe = read_recipe(run.config())
    for rank in json.loads((tmp_path / "found.json").read_text()):
        assert bool(rank.get("int8 copies")) == (format == "int8_w8a8")
        planned = terms(stage_memory(plan_of(recipe), settings_of(recipe), rank["stage"]))
        for term, formula in planned.items():
            share = 0.25 if term == "sync buffers" else 0.02
            assert rank[term] == pytest.approx(formula, rel=share), term
        for term in ("adapters", "gradients"):
            assert rank[term] == rank[f"{term}, back"]
        # during updates
        kept = rank["vLLM's weights"] + rank["KV cache"] if rows is GRAPHS else 0
        assert rank["kept"] == pytest.approx(kept, rel=0.01)
        assert rank["KV cache"] % rank["KV cache of a token"] == 0 < rank["KV cache"]
    assert "processes ran it: TP" in (run.path / "rehearsal.md").read_text()
    errors = [row.get("quantization/weight_error", 0) > 0 for row in read_jsonl(run.metrics_file)]
    assert errors == [format != "none"] * 2
