"""The ranking, the layouts near an illegal one, and the command line that shows them."""

import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout import planner, show
from mindspeed_qerl.layout.memory import MOMENTS, estimate, settings_of
from mindspeed_qerl.layout.parts import GB
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.planner import (
    changes,
    complete,
    distance,
    fit_batch,
    legal_layouts,
    nearest,
    new_plan,
    reasons,
)
from mindspeed_qerl.layout.rules import BATCH, ROLLOUT, TRAINING, broken
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Batch, Layout

sys.path.insert(0, str(Path(__file__).parent))
from dealing import can_run

ROOT = Path(__file__).parents[2]
QWEN3, QWEN15, DENSE = (
    NAMED_SHAPES[name] for name in ("qwen3_30b_a3b", "qwen15_moe_a2_7b", "qwen25_7b")
)


def sizes(plan) -> tuple[int, ...]:
    return tuple(getattr(plan.layout, name) for name in planner.CHANGEABLE)


@pytest.mark.parametrize(
    "shape, world", [(QWEN3, 16), (QWEN3, 12), (QWEN15, 12), (DENSE, 8), (QWEN3, 6)]
)
def test_exactly_the_training_layouts_that_can_run(shape, world):
    """Every combination of sizes up to the ranks, judged by dealing: those for which some inference
    layout can run are listed.
    """
    found = {
        (it.plan.layout.tp, it.plan.layout.pp, it.plan.layout.ep)
        for it in legal_layouts(shape, world)
    }
    span = range(1, world + 1)
    possible = set()
    for tp, pp, ep in product(span, span, span if shape.moe else (1,)):
        if tp * pp * ep <= world and world % (tp * pp) == 0 and shape.num_attention_heads % tp == 0:
            for infer_tp, infer_ep in product(span, span if shape.moe else (1,)):
                if infer_tp * infer_ep <= world and can_run(
                    new_plan(
                        shape,
                        Layout(world, tp=tp, pp=pp, ep=ep, infer_tp=infer_tp, infer_ep=infer_ep),
                    )
                ):
                    possible.add((tp, pp, ep))
                    break
    assert found == possible and found


@pytest.mark.parametrize(
    "shape, world, best",
    [
        (QWEN3, 16, (1, 1, 1, 16, 1, 16)),
        (QWEN3, 12, (1, 1, 1, 4, 1, 4)),
        (QWEN15, 16, (1, 1, 1, 4, 1, 4)),
        (DENSE, 8, (1, 1, 1, 1, 1, 1)),
    ],
)
def test_the_first_choice(shape, world, best):
    ranked = legal_layouts(shape, world)
    assert sizes(ranked[0].plan) == best and ranked[0].fits
    assert all(not broken(entry.plan) for entry in ranked)
    assert [entry.fits for entry in ranked] == sorted(
        (entry.fits for entry in ranked), reverse=True
    )


def test_groups_across_nodes_come_last_and_are_named():
    ranked = legal_layouts(QWEN3, 16, ranks_per_node=8)
    across = [
        any("across nodes" in reason for reason in reasons(entry)) for entry in ranked if entry.fits
    ]
    assert across == sorted(across) and any(across) and not across[0]
    assert sizes(ranked[0].plan)[:4] == (1, 1, 1, 8)


@pytest.mark.parametrize(
    "wanted, world, expected",
    [(64, 12, 60), (64, 16, 64), (64, 48, 48), (1, 16, 16), (90, 12, 84), (64, 1024, 1024)],
)
def test_the_nearest_batch(wanted, world, expected):
    plan = fit_batch(new_plan(DENSE, Layout(world, ranks_per_node=world), Batch(wanted, wanted)))
    assert plan.batch.global_batch_size == plan.batch.mini_batch_size == expected and not broken(
        plan
    )


def test_a_fitted_batch_has_equal_mini_batches_and_no_wrong_dispatch():
    plan = fit_batch(
        new_plan(DENSE, Layout(12), Batch(64, 32, dispatch={"adv_dispatch_size": 512}))
    )
    assert (
        plan.batch.global_batch_size,
        plan.batch.mini_batch_size,
        dict(plan.batch.dispatch),
    ) == (60, 12, {}) and not broken(plan)


@pytest.mark.parametrize(
    "shape, world, typed",
    [
        (QWEN3, 12, (3, 1, 1, 4, 6, 2)),
        (QWEN15, 16, (4, 1, 1, 4, 4, 4)),
        (QWEN3, 16, (8, 1, 1, 2, 1, 16)),
        (DENSE, 8, (7, 1, 1, 1, 7, 1)),
        (QWEN3, 16, (1, 5, 1, 4, 1, 16)),
        (DENSE, 8, (2, 1, 2, 1, 3, 1)),
    ],
)
def test_nearest_are_legal_and_nothing_is_nearer(shape, world, typed):
    plan = new_plan(shape, Layout(world, **dict(zip(planner.CHANGEABLE, typed, strict=True))))
    assert broken(plan)
    near = nearest(plan, 3)
    assert len(near) == 3 and all(not broken(other) for other in near)
    span = range(1, world + 1)
    closest = min(
        distance(plan, fit_batch(candidate))
        for tp, pp, ep, infer_tp, infer_ep in product(
            (1, 2, 4, 8),
            (1, 2, 3, 4, 7),
            (n for n in span if world % n == 0),
            (1, 2, 4, 8),
            (n for n in span if world % n == 0),
        )
        if tp * pp * ep <= world
        and infer_tp * infer_ep <= world
        and not broken(
            fit_batch(
                candidate := new_plan(
                    shape,
                    Layout(world, tp=tp, pp=pp, ep=ep, infer_tp=infer_tp, infer_ep=infer_ep),
                    plan.batch,
                )
            )
        )
    )
    assert distance(plan, near[0]) == pytest.approx(closest)
    assert [distance(plan, other) for other in near] == sorted(
        distance(plan, other) for other in near
    )


def test_one_wrong_number_is_one_change():
    plan = new_plan(QWEN3, Layout(16, ep=16, infer_ep=8))
    assert changes(plan, nearest(plan, 1)[0], batch=False) in (["infer_ep 8 -> 16"], ["ep 16 -> 8"])
    raw = compose("grpo_qwen3_30b_a3b_gsm8k_16npu", ["megatron_training.global_batch_size=60"])
    plan = plan_of(read_recipe(raw))
    near = nearest(plan, 1, settings_of(read_recipe(raw)))[0]
    assert sizes(near) == sizes(plan) and "global_batch_size 60 -> 64" in changes(plan, near)


def test_inference_sizes_that_are_left_out_are_chosen():
    assert sizes(complete(QWEN3, Layout(16, tp=4, ep=4), ("tp", "ep")))[-2:] == (1, 16)
    assert sizes(complete(QWEN3, Layout(16, tp=4, ep=4, infer_tp=4), ("tp", "ep", "infer_tp")))[
        -2:
    ] == (4, 4)
    illegal = complete(QWEN15, Layout(16, tp=4, ep=4), ("tp", "ep"))
    assert {fault.rule for fault in broken(illegal)} >= {"experts_by_training_ranks"}


def test_pipeline_waits_for_its_slowest_stage():
    """A head that costs as much as four layers: 4 stages of 1 layer each wait for the last, besides
    the bubble.
    """
    shape = replace(DENSE, num_hidden_layers=4)
    plan = new_plan(shape, Layout(4, pp=4), Batch(64, 64, samples_per_prompt=1))
    work = planner.stage_work(plan)
    assert (
        work[0] == work[1] == work[2] and work[3] - work[0] == shape.vocab_size * shape.hidden_size
    )
    assert planner.idle_share(plan) == pytest.approx(1 - sum(work) / 4 / work[3] * 64 / 67)
    assert planner.idle_share(new_plan(DENSE, Layout(4))) == 0


# ---- the command line ----


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "plan_layout.py"), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
    )


@pytest.fixture
def run_here(monkeypatch, capsys):
    """`run` in this process, which has imported what the tool needs."""

    def run_here(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["plan_layout.py", *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools" / "plan_layout.py"), run_name="__main__")
        return subprocess.CompletedProcess(arguments, end.value.code or 0, *capsys.readouterr())

    return run_here


VERDICTS = [
    ("qwen3_30b_a3b", 12, "tp=3,pp=1,ep=4,infer_tp=6,infer_ep=2", 1),
    ("qwen3_30b_a3b", 16, "tp=4,ep=4,infer_tp=4,infer_ep=4", 0),
    ("qwen3_30b_a3b", 16, "tp=4,ep=4,infer_tp=2,infer_ep=8", 0),
    ("qwen3_30b_a3b", 16, "tp=4,ep=4,infer_tp=1,infer_ep=16", 0),
    ("qwen3_30b_a3b", 16, "tp=1,ep=16", 0),
    ("qwen3_30b_a3b", 16, "tp=4,ep=2,infer_tp=1,infer_ep=8", 0),
    ("qwen3_30b_a3b", 12, "tp=4,pp=3,ep=1,infer_tp=4,infer_ep=1", 0),
    ("qwen3_30b_a3b", 12, "tp=4,pp=1,ep=1,infer_tp=4,infer_ep=1", 0),
    ("qwen15_moe_a2_7b", 16, "tp=4,ep=4", 1),
    ("qwen15_moe_a2_7b", 12, "tp=4,ep=3", 0),
]


@pytest.mark.parametrize("model, ranks, check, status", VERDICTS)
def test_verdicts(run_here, model, ranks, check, status):
    result = run_here("--model", model, "--ranks", str(ranks), "--check", check, "--json")
    said = json.loads(result.stdout)
    assert result.returncode == status and said["legal"] == (status == 0)
    assert (
        bool(said["broken"]) == (status == 1)
        and (said["memory"] is None) == (status == 1)
        and len(said["nearest"]) == 3 * status
    )
    if said["legal"]:
        sums = {
            moment: sum(part["bytes"] for part in parts)
            for moment, parts in said["memory"]["parts"].items()
        }
        assert said["memory"]["totals"] == sums and len(sums) == 4 and min(sums.values()) > 10e9


def test_a_verdict_for_people():
    illegal = run(
        "--model",
        "qwen3_30b_a3b",
        "--ranks",
        "12",
        "--check",
        "tp=3,pp=1,ep=4,infer_tp=6,infer_ep=2",
    )
    for text in (
        "illegal: 8 of",
        "32 attention heads cannot be divided by TP 3",
        "transformer_config.py:559",
        "128 experts cannot be divided by TP 3 x EP 4 = 12",
        "tp 3 -> 1, infer_tp 6 -> 2",
    ):
        assert text in illegal.stdout
    legal = run("--model", "qwen3_30b_a3b", "--ranks", "16", "--check", "tp=4,ep=4", COLUMNS="80")
    assert (
        legal.returncode == 0
        and "legal, all" in legal.stdout
        and "never measured on an NPU" in legal.stdout
    )
    assert "vLLM TP 1 x EP 16" in legal.stdout and "experts on their way" in legal.stdout


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"model_type": "llama"}, "the NPU engine has no weight adaptor for model_type 'llama'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "which transformers 4 does not read",
        ),
        ({}, None),
    ],
)
def test_a_model_that_no_npu_runs_has_no_layout(run_here, tmp_path, changed, reason):
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    for more in ([], ["--check", "tp=2"], ["--json"]):
        told = run_here("--model", str(tmp_path), "--ranks", "8", *more)
        assert told.returncode == (1 if reason else 0)
        first = (told.stderr if "--json" in more else told.stdout).partition("\n")[0]
        assert (
            first.startswith("No layout runs on NPUs: ") == bool(reason) and (reason or "") in first
        )


def test_configs_and_overrides():
    name = "grpo_qwen3_30b_a3b_gsm8k_16npu"
    assert run("--config-name", name).returncode == 0
    wrong = run("--config-name", name, "megatron_training.global_batch_size=60", "--json")
    said = json.loads(wrong.stdout)
    assert wrong.returncode == 1 and {fault["rule"] for fault in said["broken"]} == {
        "batch_by_training_dp",
        "batch_by_infer_dp",
    }
    assert any("global_batch_size 60 -> 64" in change for change in said["nearest"][0]["changes"])


def test_the_list(tmp_path):
    picture = tmp_path / "layouts.png"
    result = run(
        "--model",
        "qwen3_30b_a3b",
        "--ranks",
        "16",
        "--ranks-per-node",
        "8",
        "--top",
        "4",
        "--json",
        "--plot",
        str(picture),
    )
    said = json.loads(result.stdout)
    assert result.returncode == 0 and len(said["layouts"]) == 4 < said["existing"]
    assert (
        said["layouts"][0]["ep"] == 8
        and said["layouts"][0]["memory"]["fits"]
        and said["layouts"][0]["reasons"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_layout_is_explained():
    result = run("--model", "qwen3_30b_a3b", "--ranks", "7")
    assert (
        result.returncode == 1
        and "128 experts cannot be divided by TP 1 x EP 7 = 7" in result.stdout
    )
    assert "Layouts exist for 6 and for 8 ranks" in result.stdout
    nodes = run("--model", "qwen25_7b", "--ranks", "20", "--json")
    assert nodes.returncode == 1 and "20 ranks cannot be divided by 16 ranks a node" in nodes.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "--check", "tpp=3"],
            "unknown key in --check: 'tpp', did you mean",
        ),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "--check", "tp=three"],
            "--check tp=three: the size must be a whole number",
        ),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "--check", "tp=0"],
            "must be a whole number of at least 1",
        ),
        (["--model", "qwen3_30b", "--ranks", "16"], "unknown model 'qwen3_30b', did you mean"),
        (["--model", "qwen3_30b_a3b"], "--model and --ranks are needed"),
        (["--ranks", "sixteen"], "invalid int value"),
        (["--model", "qwen3_30b_a3b", "--ranks", "-4"], "--ranks -4 must be at least 1"),
        (["--model", "qwen3_30b_a3b", "--ranks", "0"], "--ranks 0 must be at least 1"),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "1000000007"],
            "--ranks 1000000007 must be at least 1 and at most 100,000",
        ),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "--check", "tp=4,tp=2"],
            "--check tp=4,tp=2: tp is given twice",
        ),
        *[
            (
                ["--model", "qwen3_30b_a3b", "--ranks", "16", f"--memory-gb={size}"],
                f"--memory-gb {size} must be finite and above 0",
            )
            for size in ("nan", "inf", "0", "-1", "1e+300")
        ],
        (["--model", "tests", "--ranks", "16"], "tests has no config.json"),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "actor_config.lr=1"],
            "is an override of a config",
        ),
        (["--config-name", "grpo_qwen3"], "unknown config name 'grpo_qwen3'"),
        (
            ["--config-name", "grpo_qwen3_30b_a3b_gsm8k_16npu", "--ranks", "12"],
            "rl_config.actor_resource.num_npus=12",
        ),
        (
            ["--model", "qwen3_30b_a3b", "--ranks", "16", "--plot", "nowhere/x.png"],
            "must be a file in an existing folder",
        ),
        *[
            (["--config-name", "grpo_qwen3_30b_a3b_gsm8k_16npu", override], message)
            for override, message in (
                (
                    "+actor_config.tensor_model_paralel_size=4",
                    "unknown key 'actor_config.tensor_model_paralel_size', did you mean",
                ),
                ("++foo.bar=1", "unknown key 'foo'"),
                ("+run.nme=x", "unknown key 'run.nme', did you mean 'run.name'"),
                ("engine=locl", "unknown engine 'locl', did you mean 'local'"),
                ("megatron_training.model=nope", "megatron_training.model: unknown model 'nope'"),
                ("model.qwen3_30b_a3b=3", "must be a mapping of sizes"),
                (
                    "megatron_training.lora_target_modules=3",
                    "lora_target_modules = 3: Input should be",
                ),
                (
                    "rl_config.actor_resource.num_npus=1000000007",
                    "num_npus = 1000000007: Input should be less",
                ),
            )
        ],
    ],
)
def test_a_wrong_command_line(run_here, arguments, message):
    result = run_here(*arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_pictures(tmp_path):
    """A folder is refused before anything is computed, capitals are an ending too, and without a
    legal layout it says that there is none.
    """
    (tmp_path / "folder.png").mkdir()
    for target in (tmp_path, tmp_path / "folder.png"):
        refused = run("--model", "qwen3_30b_a3b", "--ranks", "16", "--plot", str(target))
        assert (
            refused.returncode == 2
            and f"--plot {target} must be a file" in refused.stderr
            and not refused.stdout
        )
    assert (
        run("--model", "qwen25_7b", "--ranks", "2", "--plot", str(tmp_path / "X.PNG")).returncode
        == 0
    )
    assert (tmp_path / "X.PNG").read_bytes().startswith(b"\x89PNG")
    illegal = run(
        "--model",
        "qwen3_30b_a3b",
        "--ranks",
        "12",
        "--check",
        "tp=3",
        "--json",
        "--plot",
        str(tmp_path / "no.png"),
    )
    assert (
        illegal.returncode == 1
        and "no picture was written" in illegal.stderr
        and not (tmp_path / "no.png").exists()
    )
    assert json.loads(illegal.stdout)["legal"] is False


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "1 node of 16; for two: --ranks-per-node 8"),
        (["--ranks-per-node", "8"], "; 2 nodes of 8\n"),
        (["--ranks-per-node", "16"], "; 1 node of 16\n"),
    ],
)
def test_the_nodes_that_were_assumed_are_said(arguments, said):
    result = run("--config-name", "grpo_qwen3_30b_a3b_gsm8k_2x8npu", *arguments)
    assert result.returncode == 0 and said in result.stdout


def test_a_reader_that_stops_reading():
    with subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "tools" / "plan_layout.py"),
            "--model",
            "qwen3_30b_a3b",
            "--ranks",
            "16",
            "--top",
            "500",
            "--json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_when_nothing_fits_the_nearest_to_fitting_is_first():
    ranked = legal_layouts(QWEN3, 8, memory_gb=24)
    over = [entry.excess for entry in ranked]
    assert over == sorted(over) and over[0] > 0 and not any(entry.fits for entry in ranked)
    assert over[0] == max(entry.total("weight sync") for entry in ranked[:1]) - 24 * 10**9
    result = run("--model", "qwen3_30b_a3b", "--ranks", "8", "--memory-gb", "24", "--top", "1")
    assert (
        result.returncode == 0
        and "none fits into 24 GB. The 1 nearest to it" in " ".join(result.stdout.split())
        and "does not fit: 11.5 GB over" in result.stdout
    )


@pytest.mark.parametrize("memory_gb, tp", [*product((16, 24, 40, 64), (1, 2, 4))])
def test_no_excess_is_to_fit(memory_gb, tp):
    """excess is 0 exactly where there is no fault; a KV cache that is too small for one answer is a
    fault as well.
    """
    for ranked in legal_layouts(
        replace(DENSE, num_key_value_heads=4 * tp, num_attention_heads=28 * tp),
        8,
        memory_gb=memory_gb,
    ):
        assert (ranked.excess == 0) == (not ranked.faults) == ranked.fits


@pytest.mark.parametrize("width", [60, 80, 110])
def test_notes_are_never_lost(width):
    """Below 100 columns they stand under the table; no number is cut off."""
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    show.print_layouts(
        console, [*legal_layouts(QWEN3, 12)[:2], *legal_layouts(QWEN3, 8, memory_gb=24)[:1]]
    )
    text = console.file.getvalue()
    assert "tight" in text and "does not fit: 11.5 GB over" in text and "…" not in text
    assert ("1, 2: tight\n3: does not fit" in text) == (width < 100) == ("colls" not in text)
    assert max(map(len, text.splitlines())) <= width


# ---- docs/layouts.md ----


def test_the_guide_has_the_rules_and_the_memory_as_they_are():
    guide = (ROOT / "docs" / "layouts.md").read_text()
    assert rules_markdown() in guide
    assert memory_markdown(shipped_memories()) in guide


def rules_markdown() -> str:
    """Every rule with its source."""
    lines = []
    for title, rules in (("Training", TRAINING), ("Rollout", ROLLOUT), ("Batch", BATCH)):
        lines += [f"**{title}**", ""]
        for rule in rules:
            repository, path = rule.source.split(" ")
            lines.append(f"- {rule.statement} ({repository} `{path.rpartition('/')[2]}`)")
        lines.append("")
    return "\n".join(lines)


def memory_markdown(memories: dict) -> str:
    """What several configs need at each moment, side by side, GB."""
    lines = [
        "| GB of one rank | " + " | ".join(memories) + " |",
        "|---" * (1 + len(memories)) + "|",
    ]
    for moment in reversed(MOMENTS):
        sums = " | ".join(f"{memory.total(moment) / GB:.1f}" for memory in memories.values())
        lines.append(f"| {moment} | {sums} |")
    answers = " | ".join(
        f"{memory.answers_at_once}, {memory.answers_needed}" for memory in memories.values()
    )
    lines.append(f"| full-length answers that fit into the KV cache, needed | {answers} |")
    return "\n".join(lines)


def shipped_memories() -> dict:
    """The memory of the three configs that the guide compares."""
    memories = {}
    for name in (
        "grpo_qwen3_30b_a3b_gsm8k_16npu",
        "grpo_qwen15_moe_a27b_gsm8k_16npu",
        "grpo_qwen25_7b_gsm8k_8npu",
    ):
        raw = compose(name)
        memories[name.split("_gsm8k")[0].removeprefix("grpo_")] = estimate(
            plan_of(read_recipe(raw)), settings_of(read_recipe(raw))
        )
    return memories
