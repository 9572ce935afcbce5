"""Whole runs through the command line: what they leave behind, and what is left when something
dies.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise

import psutil
import pytest

from mindspeed_qerl.local.checkpoint import read_state
from mindspeed_qerl.local.evaluate import evaluate, of_run
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from tests import ROOT


def start(model, runs, *overrides):
    """A run in the background, in a session of its own; its output line by line."""
    command = [
        sys.executable,
        "cli/train_grpo.py",
        "--config-name",
        "grpo_tiny_moe_cpu",
        f"megatron_training.tokenizer_name_or_path={model}",
        f"run.root={runs}",
        "megatron_training.global_batch_size=4",
        "rl_config.mini_batch_size=4",
        *overrides,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def only_run(runs):
    (directory,) = runs.glob("*/*")
    return RunDirectory.open(directory)


def until(process, text):
    """Read the process's output up to the first line that holds `text`; returns what was read."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} never came:\n{''.join(lines)}")


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def finish(process, timeout=120):
    output = process.stdout.read()
    return process.wait(timeout), output


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def assert_metrics_are_whole(run, at_least):
    rows = read_jsonl(run.metrics_file)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= at_least
    return rows


def assert_adapters_reached_the_rollout(facts):
    assert {target: count["modules"] for target, count in facts["lora"].items()} == {
        "linear_qkv": 2,
        "linear_proj": 2,
        "linear_fc1": 16,
        "linear_fc2": 16,
    }
    for entry in facts["lora_movement"].values():
        assert (
            entry["moved"] == pytest.approx(entry["expected"], rel=1e-3)
            and entry["max_error"] <= 2 * entry["resolution"]
        )


def recorded(run, last=6):
    """Everything that a run writes step by step, times aside, up to its step `last`."""
    return [
        {name: value for name, value in row.items() if "time/" not in name and name != "seconds"}
        for file in (run.metrics_file, run.eval_file, run.eval_answers_file, run.rollouts_file)
        for row in read_jsonl(file)
        if row["step"] <= last
    ]


def assert_alike(run, other, last=6):
    """Row by row: a difference is shown with its names, not with the first characters of its row."""
    for row, expected in zip(recorded(run, last), recorded(other, last), strict=True):
        assert row == expected


# An untrained model never answers right, so the reward here is a verifier that random digits can
# satisfy: the last number.
SAVING = """
megatron_training.train_iters=6 megatron_training.save_interval=3
aqn.num_stages=3 aqn.schedule=target aqn.draws=answer aqn.repeat_every=2
rl_config.verifier_function=[gsm8k] rl_config.n_samples_per_prompt=32 rl_config.init_kl_coef=0.01
eval.n_problems=4 eval.every=3 eval.temperature=0 eval.samples_per_problem=1
actor_config.lr=1e-3 actor_config.lr_decay_style=linear
rl_config.filter_groups_enable=true rl_config.filter_groups_train_batch_size=2
rl_config.mini_batch_size=2 rl_config.filter_groups_max_batches=2
algorithm.mask_truncated_completions=true rl_config.use_kl_in_reward=true
algorithm.routing_replay=rollout rollout_quantization=int8_w8a8
""".split()


@pytest.fixture(scope="module")
def unbroken(tiny_model, tmp_path_factory):
    """A run that nobody killed."""
    runs = tmp_path_factory.mktemp("unbroken")
    code, output = finish(start(tiny_model, runs, *SAVING))
    assert code == 0, output
    return only_run(runs)


def test_word_problems_train_the_adapters_and_prove_the_sync(unbroken):
    """The answers of the last checkpoint, its adapters merged into the model, are those of the
    run's own last evaluation.
    """
    assert_adapters_reached_the_rollout(unbroken.facts())
    rows = assert_metrics_are_whole(unbroken, 6)
    # of routes that the format chose otherwise, while there is no update
    assert rows[-1]["reward/kl"] > 10 * rows[0]["reward/kl"] and rows[1]["loss/kl"] == 0
    assert all(0.004 < row["quantization/weight_error"] < 0.01 for row in rows)
    assert sorted(path.name for path in unbroken.checkpoints_dir.iterdir()) == [
        "iter_0000003",
        "iter_0000006",
    ]
    sigmas = [row["aqn/sigma"] for row in rows]
    assert sigmas[:3] == [0, 0, 0.05]
    for before, after in pairwise(rows[2:]):
        if "aqn/reached_k3" in before:
            target, off = before["aqn/target_k3"], before["aqn/without_noise"]
            wanted = target + off
            seen = (before["aqn/reached_k3"] + off) / wanted
            gap = 1 - seen if seen > 0.1 else -math.log(max(seen, 1e-9))
            change = math.exp(0.25 * math.sqrt(wanted / target) * gap)
            expected = before["aqn/sigma"] * min(max(change, 0.5), 2)
            assert after["aqn/sigma"] == pytest.approx(expected)
    assert len(set(sigmas)) > 2
    assert all(row["aqn/layers"] == 2 for row in rows) and rows[-1][
        "aqn/measured_std"
    ] == pytest.approx(sigmas[-1], rel=0.2)
    assert [row["step"] for row in rows if "aqn/explained_by_draws" in row] == [4, 6]
    assert [row["step"] for row in read_jsonl(unbroken.eval_file)] == [0, 3, 6]
    assert {path.name for path in unbroken.plots_dir.iterdir()} >= {
        "learning.png",
        "noise.png",
        "time.png",
        "mismatch.png",
    }
    replayed = [row for row in rows if "loss/total" in row]
    assert all(
        row["routing/captured_tokens"] > row["routing/replayed_tokens"] > 0 for row in replayed
    )
    assert max(row["routing/flipped"] for row in replayed) > 0  # noise sent a token elsewhere
    asked, trained = (
        [row[f"selection/{name}_groups"] for row in rows] for name in ("sampled", "trained")
    )
    assert (
        set(asked) == {4, 8} and max(trained) == 2
    )  # in some steps one batch had enough groups with signal
    state = read_state(unbroken.checkpoints_dir)
    assert (
        unbroken.identity().items() <= state.items() and state["run"] and len(state["base"]) == 64
    )
    assert state["prompts_asked"] == sum(asked) and state["updates"] == sum(
        "loss/total" in row for row in rows
    )

    evaluate(of_run(unbroken.path), unbroken.path / "evaluations/step6", print)
    before, after = (
        [row for row in read_jsonl(unbroken.eval_answers_file) if row["step"] == step]
        for step in (0, 6)
    )
    assert read_jsonl(unbroken.path / "evaluations/step6/answers.jsonl") == after
    assert [row["responses"] for row in before] != [row["responses"] for row in after]


@pytest.mark.parametrize(
    "victim, stopped_by",
    [
        ("rank 1", signal.SIGINT),
        pytest.param("rollout engine", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(None, None, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tiny_model, unbroken, tmp_path, victim, stopped_by
):
    """A process that dies ends the run with its name; run.resume=auto then does what the run did
    that nobody killed, until it ends or is stopped. Victim None: the whole run, with no time to say
    anything. No process is left behind.
    """
    process = start(tiny_model, tmp_path / "runs", *SAVING)
    until(process, "step 4/6")
    killed, children = only_run(tmp_path / "runs"), descendants(process)
    pid = killed.facts()["processes"][victim] if victim else process.pid
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert_gone(children)
    if victim:
        assert code == 1 and f"error: {victim} died" in output
        assert "Traceback" not in output
        assert killed.status()["state"] == "failed" and victim in killed.status()["reason"]
    else:
        assert code == -signal.SIGKILL and killed.status()["state"] == "running"
    assert_metrics_are_whole(killed, 4)

    process = start(tiny_model, tmp_path / "runs", *SAVING, "run.resume=auto")
    begun = until(process, "step 5/6")
    children = descendants(process)
    if stopped_by:
        process.send_signal(stopped_by)
    code, rest = finish(process)
    assert code == (130 if stopped_by else 0), begun + rest
    assert_gone(children)
    assert f"run.resume=auto: {killed.path}" in begun and "Resumes after step 3" in begun
    last = len(assert_metrics_are_whole(killed, 5 if stopped_by else 6))
    assert_alike(killed, unbroken, last)
    discarded = [row["step"] for row in read_jsonl(killed.path / "discarded" / "metrics.jsonl")]
    assert discarded in ([4], [4, 5])  # 6 has a checkpoint
    assert killed.status()["state"] == ("failed" if stopped_by else "finished")
    assert (killed.path / "command.txt").read_text().count("\n") == 2


def test_what_cannot_be_gone_on_with_is_refused(tiny_model, unbroken, tmp_path):
    """Another learning rate and other routes by name, a damaged checkpoint by file."""
    stopped = tmp_path / "runs" / unbroken.path.name
    shutil.copytree(unbroken.path, stopped)
    RunDirectory.open(stopped).fail("killed")
    code, output = finish(
        start(
            tiny_model,
            tmp_path / "runs",
            *SAVING,
            f"run.resume={stopped}",
            "actor_config.lr=2e-3",
            "algorithm.routing_replay=none",
        )
    )
    assert code == 2 and "actor_config.lr was 0.001 and is 0.002" in output
    assert "algorithm.routing_replay was 'rollout' and is 'none'" in output
    shard = next((stopped / "checkpoints" / "iter_0000006").glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    code, output = finish(start(tiny_model, tmp_path / "runs", *SAVING, f"run.resume={stopped}"))
    assert (
        code == 2
        and f"{shard.name} has {len(content) - 1:,} bytes and had {len(content):,}" in output
    )
    assert "Traceback" not in output


@pytest.mark.full
def test_a_killed_sweep_started_again_ends_with_all_runs_whole(tiny_model, tmp_path):
    """Four runs, killed in the middle of the second one: the first is not run again, the second
    goes on as if nothing had happened, with errors of other hardware as they would have been drawn.
    """
    sweep = [
        *SAVING,
        "aqn=off,qerl",
        "aqn.draws=step",
        "seed=1,2",
        "hardware_error.training=gaussian",
        "hardware_error.rollout=gaussian",
        "--multirun",
    ]
    code, output = finish(start(tiny_model, tmp_path / "unbroken", *sweep), timeout=300)
    assert code == 0, output
    process = start(tiny_model, tmp_path / "killed", *sweep)
    until(process, "step 6/6")
    until(process, "step 4/6")
    children = descendants(process)
    process.kill()
    finish(process)
    assert_gone(children)
    code, output = finish(start(tiny_model, tmp_path / "killed", *sweep), timeout=300)
    assert (
        code == 0
        and output.count("finished before, in") == 1
        and output.count("Resumes after step 3") == 1
    ), output
    unbroken, killed = (
        [
            RunDirectory.open(path.parent)
            for path in sorted((tmp_path / name).glob("*/*/status.json"))
        ]
        for name in ("unbroken", "killed")
    )
    assert [run.status()["state"] for run in killed] == ["finished"] * 4
    for run, expected in zip(killed, unbroken, strict=True):
        assert_alike(run, expected)
