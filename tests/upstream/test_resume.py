"""A run that is killed after its second iteration and resumed ends like one that is not."""

import json
import signal

import psutil
import pytest
import torch
from rehearsal import finished, make_config, run_engine, start_engine

from mindspeed_qerl.common.files import fault_of_files
from mindspeed_qerl.local.checkpoint import load_adapters
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

LAYOUTS = [dict(npus=2, ep=2, infer_ep=2), dict(npus=2, tp=2, ep=1, infer_ep=2)]
DYNAMIC = {
    "rl_config.filter_groups_enable": True,
    "rl_config.filter_groups_max_batches": 3,
    "rl_config.use_kl_in_reward": True,
    "rl_config.init_kl_coef": 0.01,
    "algorithm": {"routing_replay": "rollout"},
}
GSPO = {
    "algorithm": {"loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "rl_config.mini_batch_size": 2,
    "rollout_correction": {"method": "token_tis"},
    "rollout_quantization": {"format": "nvfp4"},
    "aqn.schedule": "target",
}


def numbers(run: RunDirectory) -> list[dict]:
    """The metrics without times."""
    rows = read_jsonl(run.metrics_file)
    return [
        {name: value for name, value in row.items() if "tim" not in name and "tps" not in name}
        for row in rows
    ]


@pytest.mark.parametrize("layout, options", zip(LAYOUTS, (DYNAMIC, GSPO)), ids=["ep2", "tp2"])
def test_killed_and_resumed(layout, options, upstream, tiny, tmp_path):
    changes = {
        "eval.every": 1,
        "aqn.num_stages": 3,
        "actor_config.lr_decay_style": "linear",
        **options,
    }
    sizes = dict(samples=4, base=tmp_path / "base")
    model, data = tiny("qwen3_moe")
    config = make_config("qwen3_moe", model, data, tmp_path, **layout, **sizes, changes=changes)
    (tmp_path / "a").mkdir()
    unbroken = finished(run_engine(config, upstream, tmp_path / "a"), tmp_path / "rehearsal").path

    (tmp_path / "b").mkdir()
    process = start_engine(config, upstream, tmp_path / "b")
    children = []
    for line in process.stdout:
        if "Checkpoint of step 2 saved" in line:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert gone and not alive
    [broken] = set((tmp_path / "rehearsal").iterdir()) - {unbroken}
    assert RunDirectory.open(broken).status()["step"] == 2

    config["run"]["resume"] = str(broken)
    resumed = run_engine(config, upstream, tmp_path / "b")
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]

    before, after = RunDirectory.open(unbroken), RunDirectory.open(broken)
    assert after.status()["state"] == "finished" and after.status()["step"] == 3
    assert numbers(before) == numbers(after)
    if options is DYNAMIC:
        check_selection(before)
    else:
        assert all(row["quantization/weight_error"] > 0.05 for row in numbers(before))
        sigmas = [row["aqn/sigma"] for row in numbers(before)]
        assert sigmas[:2] == [0, 0.05] and sigmas[2] not in (0, 0.05)
    for one, other in zip(read_jsonl(before.eval_file), read_jsonl(after.eval_file), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    expected, actual = (
        load_adapters(run.checkpoints_dir, model, 3).weights for run in (before, after)
    )
    assert expected.keys() == actual.keys() and len(expected) > 10
    for module, pair in expected.items():
        assert all(torch.equal(one, other) for one, other in zip(pair, actual[module])), module
    assert (
        sum(bool(b.any()) for _, b in actual.values()) > len(actual) / 2
    )  # some experts of so few tokens get none


def check_selection(run: RunDirectory) -> None:
    """What dynamic sampling asked, trained and left in the checkpoint, and KL in the reward."""
    rows = read_jsonl(run.metrics_file)
    batches = [row["selection/sampled_groups"] // 4 for row in rows]
    assert max(batches) > 1 and all(1 <= count <= 3 for count in batches)
    assert any("loss/kl" in row for row in rows)
    for row, asked in zip(rows, batches):
        with_signal = row["reward/groups_with_signal"] * row["selection/sampled_groups"]
        assert row["selection/trained_groups"] == pytest.approx(min(4, with_signal))
        assert asked == 3 or with_signal >= 4
        assert "reward/kl" in row
        # a step that trains nothing has no loss
        assert row.get("loss/kl") == (0 if row["selection/trained_groups"] else None)
    left = json.loads((run.checkpoints_dir / "iter_0000002" / "data.json").read_text())
    files = left.pop("files")
    assert left == {"batches_asked": sum(batches[:2]), **run.identity()}
    folder = run.checkpoints_dir / "iter_0000002"
    assert (
        files.keys()
        == {str(file.relative_to(folder)) for file in folder.glob("mp_rank_*/*")}
        != set()
    )
    assert fault_of_files(folder, files) is None


def test_a_step_that_trains_nothing_changes_nothing_and_is_saved(upstream, tiny, tmp_path):
    """Every answer is cut off after its first token, and those are not trained; AdamW has made no
    step yet.
    """
    changes = {
        "algorithm": {"mask_truncated_completions": True},
        "actor_config.weight_decay": 0.1,
        "generate_config.sampling_config.max_tokens": 1,
    }
    model, data = tiny("qwen3")
    config = make_config(
        "qwen3", model, data, tmp_path, npus=2, infer_tp=2, train_iters=1, changes=changes
    )
    done = run_engine(config, upstream, tmp_path)
    run = finished(done, tmp_path / "rehearsal")
    assert (
        "Warning: step 1 trains nothing: every answer was cut off or could not be judged"
        in done.stdout
    )
    adapters = load_adapters(run.checkpoints_dir, model, 1).weights
    assert adapters and not any(b.any() for _, b in adapters.values())
    [row] = read_jsonl(run.metrics_file)
    assert (
        "loss/total" not in row
        and row["grad_norm"] == 0
        and row["response/truncated_fraction"] == 1
    )
