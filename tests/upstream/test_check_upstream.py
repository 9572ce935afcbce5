"""The contract against upstream's real sources: all holds at the pins, each clause can be broken, older tags are told apart."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_qerl.ascend import clauses
from mindspeed_qerl.ascend.contract import CONTRACT, PINS, commit_of, repository

ROOT = Path(__file__).parents[2]
UPSTREAM = Path(os.environ.get("UPSTREAM", "/nonexistent"))
GIVEN = {key: UPSTREAM / pin.title for key, pin in PINS.items() if (UPSTREAM / pin.title / key).is_dir()}
NEEDED = ("mindspeed_rl", "mindspeed_llm", "mindspeed")

pytestmark = pytest.mark.skipif(not all(key in GIVEN for key in NEEDED), reason=(
    "UPSTREAM must name a folder with checkouts of MindSpeed-RL, MindSpeed-LLM, MindSpeed [, Megatron-LM, vllm-ascend] at the "
    "pins of mindspeed_qerl/ascend/contract.py"))


def run_tool(roots):
    arguments = [f"--{key.replace('_', '-')}={root}" for key, root in roots.items()]
    command = [sys.executable, ROOT / "tools/check_upstream.py", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_everything_holds_at_the_pins():
    at_the_pins = {key: root for key, root in GIVEN.items() if commit_of(root) in (None, PINS[key].commit)}
    done = run_tool(at_the_pins)
    assert "  broken" not in done.stdout
    assert done.returncode == 0
    checked = sum(repository(clause) in at_the_pins for clause in CONTRACT)
    assert f"{len(CONTRACT)} promises: {checked} holds" in done.stdout
    assert f"MindSpeed-RL  {GIVEN['mindspeed_rl']} at 05a90d7, the pin" in done.stdout or commit_of(GIVEN["mindspeed_rl"]) is None


@pytest.mark.parametrize(("file", "old", "new", "told"), [
    ("mindspeed_rl/models/rollout/vllm_engine.py", "sync_model_weights(self, params,", "sync_model_weights(self, weights,",
     "its parameters are (self, weights, load_format='megatron')"),
    ("mindspeed_rl/workers/resharding/weight_adaptor.py", '    "Qwen3MoeForCausalLM": Qwen3MoeMVWeightAdaptor,\n', "",
     "'Qwen3MoeForCausalLM' is missing"),
    ("mindspeed_rl/workers/actor_hybrid_worker.py", "        self.iteration += 1\n", "        self.iteration += 2\n",
     "`self.iteration += 1` does not occur; the nearest is `self.iteration += 2`"),
])
def test_a_changed_file_is_named(tmp_path, file, old, new, told):
    shutil.copytree(GIVEN["mindspeed_rl"] / "mindspeed_rl", tmp_path / "mindspeed_rl")
    shutil.copytree(GIVEN["mindspeed_rl"] / "cli", tmp_path / "cli")
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1
    (tmp_path / file).write_text(text.replace(old, new))
    done = run_tool({**{key: GIVEN[key] for key in NEEDED}, "mindspeed_rl": tmp_path})
    assert done.returncode == 1
    assert f"  broken  {file}" in done.stdout
    assert told in done.stdout


@pytest.mark.parametrize(("tag", "missing"), [
    ("v2.2.0", ["self.actor_model_config.lora_r = self.megatron_config.lora_r", "DataStrategy is not a name of the module",
                "'retool_reward' is missing", "'Qwen3MoeForCausalLM' is missing", "lora_target_modules"]),
    ("v2.3.0", ["self.actor_model_config.lora_r = self.megatron_config.lora_r", "DataStrategy is not a name of the module",
                "'retool_reward' is missing", "'Qwen3MoeForCausalLM' is missing", "share_backbone"]),
])
def test_an_older_tag_is_told_what_it_lacks(tmp_path, tag, missing):
    command = ["git", "-C", GIVEN["mindspeed_rl"], "archive", tag, "cli", "mindspeed_rl"]
    archive = subprocess.run(command, check=False, capture_output=True)
    if archive.returncode:
        pytest.skip(f"the checkout of MindSpeed-RL has no tag {tag}")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    done = run_tool({**{key: GIVEN[key] for key in NEEDED}, "mindspeed_rl": tmp_path})
    assert done.returncode == 1
    for text in missing:
        assert text in done.stdout


@pytest.mark.parametrize("clause", [clause for clause in CONTRACT if repository(clause) in GIVEN], ids=lambda clause: clause.name)
def test_each_part_of_each_clause_can_be_broken(clause):
    """Take away in turn everything that the clause names: none of it may go unnoticed."""
    source = (GIVEN[repository(clause)] / clause.file).read_bytes()
    parts = 0
    while True:
        module = ast.parse(source)
        changes = list(ways_to_break(clause, module))
        if parts == len(changes):
            break
        changes[parts]()
        with pytest.raises(clauses.Broken):
            clause.look(module)
        parts += 1
    assert parts > 0


def ways_to_break(clause, module):
    """Functions that change `module` in place."""
    owner_name, _, variable = clause.name.rpartition(".")
    if isinstance(clause, clauses.Dictionary):
        display = clauses._dictionary(clauses.find(module, owner_name), variable)
        for key in clause.entries:
            yield lambda key=key: rename_key(display, key)
        for key in [*clause.absent, *(["new"] if clause.exactly else [])]:
            yield lambda key=key: (display.keys.append(ast.Constant(key)), display.values.append(ast.Constant(0, lineno=1)))
        return
    owner = clauses.find(module, clause.name)
    if isinstance(clause, clauses.Source):
        for snippet in clause.snippets:
            yield lambda snippet=snippet: Remove(clauses._snippet(snippet)).visit(owner)
    elif isinstance(clause, clauses.Globals):
        for name in clause.names:
            yield lambda name=name: [setattr(node, "id", "_") for node in ast.walk(owner) if getattr(node, "id", "") == name]
    elif isinstance(clause, clauses.Attributes):
        for name in clause.names:
            yield lambda name=name: [setattr(node, "attr", "_") for node in ast.walk(owner) if getattr(node, "attr", "") == name]
    elif isinstance(clause, clauses.Class):
        yield lambda: owner.bases.append(ast.Name("Another", ctx=ast.Load()))
    elif isinstance(clause, clauses.Function):
        yield lambda: (owner.args.kwonlyargs.append(ast.arg("new")), owner.args.kw_defaults.append(None))
    elif isinstance(clause, clauses.Without):
        yield lambda: owner.body.append(ast.Expr(ast.Constant(f"args.{clause.word}")))
    elif isinstance(clause, clauses.Unchanged):
        yield lambda: owner.body.append(ast.Pass())
    if getattr(clause, "decorator", None):
        yield lambda: owner.decorator_list.clear()


def rename_key(display, key):
    for i, node in enumerate(display.keys):
        if key in (getattr(node, "value", None), ast.unparse(node)):
            display.keys[i] = ast.Constant("renamed")


class Remove(ast.NodeTransformer):
    """Put something else in the place of every node that is the same as `wanted`."""

    def __init__(self, wanted):
        self.wanted = wanted

    def visit(self, node):
        if isinstance(node, type(self.wanted)) and clauses._same(node, self.wanted):
            other = ast.Pass() if isinstance(node, ast.stmt) else ast.Name("_", ctx=ast.Load())
            return ast.copy_location(other, node)
        return self.generic_visit(node)
