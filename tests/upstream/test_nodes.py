"""Upstream's trainer on several nodes: a shipped launcher in fake boxes with addresses of their own, a
Ray across them, and upstream's real sources on emulated NPUs in each.
"""

import re
import shutil
import sys
from functools import cache

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
from mindspeed_qerl.local.checkpoint import load_adapters
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl

sys.path.insert(0, str(ROOT))
from tests.fake_box import Box, left_over, why_not
from tests.fake_box.network import ADDRESSES, joined, why_no_cable
from tests.fake_box.nodes import PAIR, TWO_NODES, Nodes
from tests.fake_box.nodes import environment as of_launchers

REASON = why_not() or why_no_cable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
# The config of 2 x 8 dies for a tiny model: TP 1, EP 2, DP over all; with 2 dies a node EP is in each.
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
# six ranks in place of four
SIX = [
    "rl_config.actor_resource.num_npus=6",
    "megatron_training.global_batch_size=12",
    "rl_config.mini_batch_size=12",
]


def wanted(ranks: int) -> list[str]:
    return SMALL if ranks == 4 else [*SMALL, *SIX]


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
def nodes(request, upstream, files, tmp_path):
    """count, dies of each. The training alone meets the emulated NPU: the launcher and the preflight
    see the box.
    """
    count, dies = request.param
    path = [str(emulation.STAND_INS), *(str(upstream / name) for name in CHECKOUTS), str(ROOT)]
    variables = {
        **{
            name: value
            for name, value in emulation.environment(dies).items()
            if name not in ("PATH", "PYTHONPATH", "ASCEND_HOME_PATH")
        },
        **files,
        **of_launchers(tmp_path, f"export PYTHONPATH={':'.join(path)}"),
        "NNODES": str(count),
    }
    launcher = TWO_NODES if count == 2 else ["grpo_trainer.sh", PAIR]
    # the preflight meets no torch_npu: its emulation is on the training's path alone
    accepted = ["--accept", "imports-of-a-worker"]
    with joined(count) as cables:
        every = Nodes(
            tmp_path,
            cables,
            variables,
            Box(dies=dies, network=False, upstream=str(upstream)),
            [*launcher, *accepted, *wanted(count * dies), f"run.root={tmp_path}/runs"],
        )
        yield every
        every.kill()


@pytest.fixture(scope="module")
def alone(upstream, files, tmp_path_factory):
    """A function that runs the same config once on one machine with so many emulated NPUs."""

    @cache
    def run_alone(ranks: int) -> RunDirectory:
        folder = tmp_path_factory.mktemp("alone")
        command = [ROOT / "cli" / "train_grpo.py", "--config-name", PAIR, *wanted(ranks)]
        variables = {**environment(upstream), **files}
        done = run_python([*command, "emulate_npu=true", f"run.root={folder}"], variables, folder)
        return finished(done, folder / PAIR)

    return run_alone


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
    model = read_recipe(alone.config()).model.path
    ours, theirs = (load_adapters(each.checkpoints_dir, model, 2).weights for each in (run, alone))
    assert ours.keys() == theirs.keys() and any(b.any() for _, b in ours.values())
    assert all(torch.equal(*pair) for name in ours for pair in zip(ours[name], theirs[name]))
    for file in alone.checkpoints_dir.glob("iter_0000002/*/distrib_optim.pt"):
        assert (
            file.read_bytes()
            == (run.checkpoints_dir / file.relative_to(alone.checkpoints_dir)).read_bytes()
        )


@pytest.mark.parametrize("nodes", [(2, 2), (3, 2)], indirect=True, ids=["2 of 2", "3 of 2"])
def test_two_iterations_are_those_of_one_machine(nodes, alone, tmp_path):
    """On nodes that share no run directory."""
    runs = tmp_path / "runs"
    runs.mkdir()
    nodes.start(0)
    for rank in nodes.ranks[1:]:
        nodes.start(rank, HIDDEN=str(runs))
    assert nodes.end(0, 900) == 0, [nodes.said(rank) for rank in nodes.ranks]
    assert [nodes.end(rank) for rank in nodes.ranks[1:]] == [0 for _ in nodes.ranks[1:]]
    assert [left_over(nodes.box(rank)) for rank in nodes.ranks] == [[] for _ in nodes.ranks]
    run = RunDirectory.open(next((runs / PAIR).iterdir()))
    world = 2 * len(nodes.ranks)
    printed = "".join(file.read_text() for file in (run.path / "logs").iterdir())
    ranks = re.findall(
        rf"rank: (\d), world_size: {world}, local rank: \d, master_addr: 10.0.0.1", printed
    )
    assert sorted(ranks) == ["0", "1"], "this node's logs"
    check_same(run, alone(world))


@pytest.mark.parametrize(
    "nodes, lost", [((3, 2), 2), ((4, 1), 1)], indirect=["nodes"], ids=["last of 3", "middle of 4"]
)
def test_a_node_is_late_and_lost_and_comes_back(nodes, lost, alone, tmp_path):
    """Killed after the first step; the same command goes on after it, to the same end, if all nodes
    see the run.
    """
    count = len(nodes.ranks)
    world = nodes.default.dies * count
    for rank in nodes.ranks[:-1]:
        nodes.start(rank, NO_PREFLIGHT="1")
    nodes.until(0, f"waiting for {world} on {count} nodes")
    nodes.start(count - 1, NO_PREFLIGHT="1")
    nodes.until(0, "Checkpoint of step 1 saved")
    nodes.lose(lost, "killed")
    nodes.until(
        0,
        f"launch: the node at {ADDRESSES[lost]} (NODE_RANK {lost}) has left Ray, and the training "
        "cannot go on without it",
    )
    assert nodes.end(0) == 1 and left_over(nodes.box(0)) == []
    for rank in set(nodes.ranks) - {0, lost}:
        assert nodes.end(rank) == 0
    run = RunDirectory.open(next((tmp_path / "runs" / PAIR).iterdir()))
    assert run.status()["state"] == "failed" and f"run.resume='{run.path}'" in nodes.said(0)

    nodes.command = [*nodes.command, f"run.resume='{run.path}'"]
    for rank in nodes.ranks:
        hidden = {"HIDDEN": str(tmp_path / "runs")} if rank == lost else {}
        nodes.start(rank, NO_PREFLIGHT="1", **hidden)
    assert [nodes.end(rank, 300) for rank in nodes.ranks] == [1, *(0 for _ in nodes.ranks[1:])]
    assert (
        f"error: the node at {ADDRESSES[lost]} has no {run.path}: to be resumed, a run must be where"
        in nodes.said(0)
    )
    for rank in nodes.ranks:
        nodes.start(rank, NO_PREFLIGHT="1")
    ends = [nodes.end(0, 900), *(nodes.end(rank) for rank in nodes.ranks[1:])]
    assert ends == [0 for _ in nodes.ranks], [nodes.said(rank) for rank in nodes.ranks]
    check_same(run, alone(world))
