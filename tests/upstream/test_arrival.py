"""What is learnt reaches vLLM in the regime that ships, on emulated NPUs: bfloat16, lr 5e-6, r 32,
alpha 64, whole runs of 20 updates with a proof after each.
"""

import pytest
from rehearsal import HERE, finished, make_config, run_engine, run_module

from mindspeed_qerl.runs.metrics import read_jsonl

UPDATES = 20
SHIPPED = {
    "actor_config.lr": 5e-6,
    "megatron_training.lora_r": 32,
    "megatron_training.lora_alpha": 64,
    "eval.n_problems": 2,
    "eval.every": UPDATES,
    "megatron_training.save_interval": UPDATES,
    "run.prove_every": 1,
    # every group has a signal
    "rl_config.verifier_function": ["varied_reward:varied"],
    "rl_config.verifier_weight": [1.0],
}
GRAPHS, EAGER = False, True
CASES = [
    ("qwen2", dict(npus=2, tp=1, infer_tp=1), GRAPHS),
    ("qwen3", dict(npus=2, tp=2, infer_tp=1), EAGER),
    ("qwen3_moe", dict(npus=4, ep=4, infer_ep=4), GRAPHS),
    ("qwen2_moe", dict(npus=2, tp=2, ep=1, infer_ep=2), EAGER),
]


def config_of(family, layout, enforce_eager, tiny, folder, **changes):
    changes = SHIPPED | {"generate_config.enforce_eager": enforce_eager} | changes
    sizes = dict(train_iters=UPDATES, samples=4)
    return make_config(family, *tiny(family), folder, **layout, **sizes, changes=changes)


@pytest.mark.parametrize("family, layout, enforce_eager", CASES, ids=str)
def test_every_update_arrives(family, layout, enforce_eager, upstream, tiny, tmp_path):
    config = config_of(family, layout, enforce_eager, tiny, tmp_path)
    run = finished(run_engine(config, upstream, tmp_path, HERE), tmp_path / "rehearsal")
    rows = read_jsonl(run.metrics_file)
    assert len(rows) == UPDATES
    for row in rows:
        for target in config["megatron_training"]["lora_target_modules"]:
            share, error = row[f"sync/arrived/{target}"], row[f"sync/arrived_error/{target}"]
            # of 320 shares in all chance takes some beyond three standard errors
            assert abs(share - 1) < 4 * error, (row["step"], target, share, error)
            assert share > 0.95 or error > 0.015, (row["step"], target, share, error)
    first, last = (
        {key: f"{row[key]:.3f}" for key in row if key.startswith("sync/arrived")}
        for row in (rows[0], rows[-1])
    )
    print(f"\n{family} {layout}: after 1 {first}\n after {UPDATES} {last}")


@pytest.mark.parametrize("family, layout, enforce_eager", CASES[1:3], ids=str)
def test_rounding_to_nearest_stops_the_run(family, layout, enforce_eager, upstream, tiny, tmp_path):
    config = config_of(family, layout, enforce_eager, tiny, tmp_path)
    done = run_module("lying_sync", config, upstream, tmp_path, "nearest")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "% of its update reached the rollout engine" in done.stderr, done.stderr[-3000:]
