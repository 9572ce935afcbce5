"""Upstream's trainer on two nodes: the shipped launcher in two fake boxes with addresses of their
own, a Ray across them, and upstream's real sources on two emulated NPUs in each.
"""

import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import write_base_checkpoint
from rehearsal import (
    CHECKOUTS,
    ROOT,
    environment,
    finished,
    make_data,
    make_model,
    run_python,
    shrink,
)

from mindspeed_qerl import emulation
from mindspeed_qerl.lora.checkpoint import load_adapters
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

sys.path.insert(0, str(ROOT))
from tests.fake_box import Box, left_over, why_not
from tests.fake_box.network import joined, why_no_cable
from tests.fake_box.nodes import CONFIG, Nodes

REASON = why_not() or why_no_cable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
# The config of 2 x 8 dies for 2 x 2 and a tiny model: TP 1, EP 2 in each node, DP 4 over both.
SMALL = [
    *(f"{key}={value}" for key, value in shrink("qwen3_moe", "qwen3_30b_a3b").items()),
    "megatron_training.save_interval=1",
    "actor_config.load=${oc.env:MODELS}/Qwen3-30B-A3B-Instruct-2507-tp1-pp1-ep2",
    "actor_config.lr=1e-3",
    "actor_config.expert_model_parallel_size=2",
    "rl_config.num_cpus_for_placement_group=1",
    "generate_config.infer_expert_parallel_size=2",
    "generate_config.gpu_memory_utilization=0.1",
    "eval.every=2",
    "run.tensorboard=false",
]
# the training alone meets the emulated NPU: the launcher and the preflight see the box
PYTHON = f"""#!/usr/bin/env bash
[[ "$*" != *preflight.py* || -z ${{NO_PREFLIGHT:-}} ]] || exit 0
[[ "$*" != *train_grpo.py* ]] || export PYTHONPATH=$TRAINING
exec {sys.executable} "$@"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """MODELS and DATA, where the config looks."""
    folder = tmp_path_factory.mktemp("files")
    model = make_model("qwen3_moe", folder / "models" / "Qwen3-30B-A3B-Instruct-2507")
    write_base_checkpoint(
        model, folder / "models" / "Qwen3-30B-A3B-Instruct-2507-tp1-pp1-ep2", ep=2
    )
    data = make_data(model, folder / "made")
    shutil.copytree(data / "chat", folder / "data" / "gsm8k")
    shutil.copytree(data / "packed", folder / "data" / "gsm8k" / model.name)
    return {"MODELS": str(folder / "models"), "DATA": str(folder / "data")}


@pytest.fixture
def nodes(upstream, files, tmp_path):
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "python").write_text(PYTHON)
    (fakes / "python").chmod(0o755)
    (fakes / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    (tmp_path / "token").write_text("0" * 64)
    emulated = emulation.environment(2)
    path = [str(emulation.STAND_INS), *(str(upstream / name) for name in CHECKOUTS), str(ROOT)]
    variables = {
        **{
            name: value
            for name, value in emulated.items()
            if name not in ("PATH", "PYTHONPATH", "ASCEND_HOME_PATH")
        },
        **files,
        "TRAINING": ":".join(path),
        "PATH": f"{fakes}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHON": str(fakes / "python"),
        "HOME": str(tmp_path),
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_prestart_worker_first_driver": "0",
    }
    with joined() as cables:
        both = Nodes(
            tmp_path,
            cables,
            variables,
            Box(dies=2, network=False, upstream=str(upstream)),
            # the preflight meets no torch_npu: its emulation is on the training's path alone
            ["--accept", "imports-of-a-worker", *SMALL, f"run.root={tmp_path}/runs"],
        )
        yield both
        both.kill()


@pytest.fixture(scope="module")
def alone(upstream, files, tmp_path_factory) -> RunDirectory:
    """The same config on one machine with four emulated NPUs."""
    folder = tmp_path_factory.mktemp("alone")
    command = [ROOT / "cli" / "train_grpo.py", "--config-name", CONFIG, *SMALL]
    variables = {**environment(upstream), **files}
    done = run_python([*command, "emulate_npu=true", f"run.root={folder}"], variables, folder)
    return finished(done, folder / CONFIG)


def check_same(run: RunDirectory, alone: RunDirectory) -> None:
    """All that a run computed is bit for bit what one machine does: numbers, answers, adapters and
    optimizer.
    """

    def rows(run, name):
        return [
            {
                key: value
                for key, value in row.items()
                if not re.search("timing|time/|_tps|seconds", key)
            }
            for row in read_jsonl(run.path / name)
        ]

    assert run.status()["state"] == alone.status()["state"] == "finished"
    for name in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl", "eval_answers.jsonl"):
        assert rows(run, name) == rows(alone, name)
    steps = rows(run, "metrics.jsonl")
    assert len(steps) == 2 and any(row["reward/std"] > 0 < row["grad_norm"] for row in steps)
    ours, theirs = (load_adapters(each.checkpoints_dir, 2).weights for each in (run, alone))
    assert ours.keys() == theirs.keys() and any(b.any() for _, b in ours.values())
    assert all(torch.equal(*pair) for name in ours for pair in zip(ours[name], theirs[name]))
    for file in alone.checkpoints_dir.glob("iter_0000002/*/distrib_optim.pt"):
        assert (
            file.read_bytes()
            == (run.checkpoints_dir / file.relative_to(alone.checkpoints_dir)).read_bytes()
        )


def test_two_iterations_are_those_of_one_machine(nodes, alone, tmp_path):
    """On nodes that share no run directory."""
    runs = tmp_path / "runs"
    runs.mkdir()
    nodes.start(0)
    nodes.start(1, HIDDEN=str(runs))
    assert nodes.end(0, 900) == 0, nodes.said(0) + nodes.said(1)
    assert nodes.end(1) == 0
    assert [left_over(nodes.box(rank)) for rank in (0, 1)] == [[], []]
    run = RunDirectory.open(next((runs / CONFIG).iterdir()))
    printed = "".join(file.read_text() for file in (run.path / "logs").iterdir())
    ranks = re.findall(r"rank: (\d), world_size: 4, local rank: \d, master_addr: 10.0.0.1", printed)
    assert sorted(ranks) == ["0", "1"], "this node's logs"
    check_same(run, alone)


def test_the_second_node_is_late_and_lost_and_comes_back(nodes, alone, tmp_path):
    """Killed after the first step; the same command goes on after it, to the same end, if both
    nodes see the run.
    """
    nodes.start(0, NO_PREFLIGHT="1")
    nodes.until(0, "waiting for 4 on 2 nodes")
    nodes.start(1, NO_PREFLIGHT="1")
    nodes.until(0, "Checkpoint of step 1 saved")
    nodes.began = dict.fromkeys(nodes.began, time.monotonic())
    nodes.process[1].kill()
    nodes.until(
        0, "launch: the node at 10.0.0.2 has left Ray, and the training cannot go on without it"
    )
    assert nodes.end(0) == 1 and left_over(nodes.box(0)) == []
    run = RunDirectory.open(next((tmp_path / "runs" / CONFIG).iterdir()))
    assert run.status()["state"] == "failed" and f"run.resume='{run.path}'" in nodes.said(0)

    nodes.arguments = [*nodes.arguments, f"run.resume='{run.path}'"]
    nodes.start(0, NO_PREFLIGHT="1")
    nodes.start(1, NO_PREFLIGHT="1", HIDDEN=str(tmp_path / "runs"))
    assert (nodes.end(0, 300), nodes.end(1)) == (1, 0)
    assert (
        f"error: the node at 10.0.0.2 has no {run.path}: to be resumed, a run must be where"
        in nodes.said(0)
    )
    for rank in (0, 1):
        nodes.start(rank, NO_PREFLIGHT="1")
    assert (nodes.end(0, 900), nodes.end(1)) == (0, 0), nodes.said(0) + nodes.said(1)
    check_same(run, alone)
