"""The contract on upstream's real sources: it holds at the pins, each entry notices a change, other
versions too.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.ascend.contract import (
    ENTRIES,
    PINS,
    UPSTREAM_VERIFIERS,
    commit_of,
    compare,
    definitions,
)

ROOT = Path(__file__).parents[2]
UPSTREAM = Path(os.environ.get("UPSTREAM", "/nonexistent"))
GIVEN = {
    package: UPSTREAM / pin.title
    for package, pin in PINS.items()
    if (UPSTREAM / pin.title / package).is_dir()
}
NEEDED = ("mindspeed_rl", "mindspeed_llm", "mindspeed")
ROOTS = {"cli": GIVEN.get("mindspeed_rl"), **GIVEN}  # first folder of a file -> its checkout
FILES = [file for file in ENTRIES if file.split("/")[0] in ROOTS]

pytestmark = pytest.mark.skipif(
    not all(package in GIVEN for package in NEEDED),
    reason=(
        "UPSTREAM must name a folder with checkouts of MindSpeed-RL, MindSpeed-LLM, MindSpeed [, "
        "Megatron-LM, vllm-ascend] at the pins of mindspeed_qerl/ascend/contract.yaml"
    ),
)


def run_tool(roots):
    arguments = [f"--{package.replace('_', '-')}={root}" for package, root in roots.items()]
    command = [sys.executable, ROOT / "tools/check_upstream.py", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def copy_of(package, folder):
    """The package without git, and MindSpeed-RL's cli."""
    for name in (package, "cli"):
        if (GIVEN[package] / name).is_dir():
            shutil.copytree(
                GIVEN[package] / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    return folder


def test_everything_is_unchanged_at_the_pins():
    at_the_pins = {
        package: root
        for package, root in GIVEN.items()
        if commit_of(root) in (None, PINS[package].commit)
    }
    done = run_tool(at_the_pins)
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if " is the pin " in line]
    assert [line.split(" in ")[0] for line in lines] == [
        PINS[package].title for package in at_the_pins
    ]
    assert (
        f"MindSpeed-RL in {GIVEN['mindspeed_rl']} is the pin 05a90d7 (branch master); 77 of 77 "
        "things" in lines[0]
    )


@pytest.mark.parametrize("file", FILES)
def test_each_entry_notices_a_change_and_a_removal(file, tmp_path):
    """Of what it names and of nothing else; the copy has no comments and another layout."""
    (tmp_path / file).parent.mkdir(parents=True)
    source = (ROOTS[file.split("/")[0]] / file).read_bytes()

    def changes(change, name):
        module = ast.parse(source)
        change(module, name)
        (tmp_path / file).write_text(ast.unparse(module))
        return {
            finding.name: finding.change for finding in compare(tmp_path, file) if finding.change
        }

    assert changes(lambda module, name: None, "") == {}
    for name in ENTRIES[file]:
        around = {
            each: "changed" for each in ENTRIES[file] if f"{name}.".startswith(f"{each}.")
        }  # its class too
        assert changes(change_code, name) == {**around, name: "changed"}
        if name:
            assert changes(rename, name) == {**around, name: "gone"}


def change_code(module, name):
    node = definitions(module, name)[-1] if name else module
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Constant("another")
    else:
        node.body.append(ast.parse("another()").body[0])


def rename(module, name):
    for node in definitions(module, name):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            target.id = "another"
        else:
            node.name = "another"


@pytest.mark.parametrize(
    ("package", "file", "old", "new", "told"),
    [
        (
            "mindspeed_rl",
            "mindspeed_rl/models/rollout/vllm_engine.py",
            "load_format='megatron'",
            "load_format='auto'",
            "(whole): our engine extends it and asks vLLM itself",
        ),
        (
            "mindspeed",
            "mindspeed/core/transformer/moe/grouped_gemm_util.py",
            "trans_b=False",
            "trans_b=True",
            "Ops.gmm: ",
        ),
    ],
)
def test_a_changed_file_is_named(tmp_path, package, file, old, new, told):
    copy = copy_of(package, tmp_path)
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1))
    done = run_tool({package: copy})
    assert done.returncode == 1
    unknown = f"{PINS[package].title} in {copy} is an unknown version (no git checkout), not {PINS[package]}"
    assert unknown in done.stdout
    assert any(
        line.startswith(f"  changed {file}:") and told in line for line in done.stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("package", "tag", "unchanged", "gone_or_changed"),
    [
        (
            "mindspeed_rl",
            "v2.3.0",
            50,
            ["changed cli/train_grpo.py:", "WEIGHT_ADAPTOR_REGISTRY"],
        ),
        (
            "mindspeed_llm",
            "v26.0.0",
            4,
            ["_add_moe_args", "LoraParallelGroupedMLP", "moe_tp_extend_ep"],
        ),
        ("mindspeed", "v26.0.0_core_r0.12.1", 6, []),
        ("megatron", "core_v0.12.2", 11, []),
    ],
)
def test_another_tag_is_named_without_git(tmp_path, package, tag, unchanged, gone_or_changed):
    folders = [package, *(["cli"] if package == "mindspeed_rl" else [])]
    archive = subprocess.run(
        ["git", "-C", GIVEN[package], "archive", tag, *folders], check=False, capture_output=True
    )
    if archive.returncode:
        pytest.skip(f"the checkout of {PINS[package].title} has no tag {tag}")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    done = run_tool({package: tmp_path})
    assert done.returncode == bool(gone_or_changed)
    assert f"is {tag} (no git checkout), not the pin {PINS[package].commit[:7]}" in done.stdout
    assert f"; {unchanged} of " in done.stdout
    assert all(text in done.stdout for text in gone_or_changed)


def test_the_verifiers_are_those_that_upstream_knows():
    module = ast.parse(
        (GIVEN["mindspeed_rl"] / "mindspeed_rl/models/rule_verifier.py").read_bytes()
    )
    (assignment,) = definitions(module, "verifier.rule_verifier_function")
    assert tuple(key.value for key in assignment.value.keys) == UPSTREAM_VERIFIERS
