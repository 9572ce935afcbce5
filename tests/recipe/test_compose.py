"""Configs as people write them: every fault of YAML or Hydra is a line with its file, at every
entry; paths are what is configured.
"""

import os
import sys

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe.compose import PATHS, combinations, compose
from mindspeed_qerl.recipe.reader import key_of
from mindspeed_qerl.recipe.types import PARTS
from tests.tasks.gsm8k.tool import run_program

TINY = "grpo_tiny_moe_cpu"


@pytest.fixture(autouse=True)
def own_configs(tmp_path, monkeypatch):
    """A folder `configs` of the user's, where the commands run."""
    (tmp_path / "configs" / "aqn").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return tmp_path / "configs"


# ---- faults ----

ON = f"defaults: [{TINY}, _self_]\n"
# name of a config: its text, and words about it
BROKEN = {
    "twice": (ON + "seed: 1\nseed: 2\n", 'duplicate key seed in "{file}", line 3'),
    "circle": ("defaults: [circle, _self_]\n", "maximum recursion depth"),
    "tab": ("run:\n\tname: a\n", '"{file}", line 2'),
    "latin": (ON + "run: {name: caf\xe9}\n", "'utf-8' codec can't decode byte"),
    "list": ("- seed\n- 1\n", "must be a DictConfig"),
    "defaults_bool": ("defaults:\n  - aqn: off\n", "Unsupported item value in defaults : bool"),
    "no_base": ("defaults:\n  - grpo_tny_moe_cpu\n  - _self_\n", "'grpo_tny_moe_cpu'"),
    "no_option": (ON.replace("_self_", "override aqn: loud, _self_"), "'aqn': mild off qerl"),
    "nowhere": (ON + "run: {root: '${nobody}'}\n", "'nobody' not found full_key: run.root"),
    "half": (ON + "run: {root: '${run'}\n", "full_key: run.root"),
    "missing": (ON + "actor_config: {beta1: '???'}\n", "Missing mandatory value: beta1"),
}


def write(folder, name):
    """Make a broken config; (its file, the words about it)."""
    text, words = BROKEN[name]
    file = folder / f"{name}.yaml"
    file.write_bytes(text.encode("latin-1"))
    return f"{file}: ", words.replace("{file}", str(file))


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_of_a_config_is_a_line_with_its_file(own_configs, name):
    place, words = write(own_configs, name)
    with pytest.raises(ConfigError) as refused:
        compose(name)
    message = str(refused.value)
    assert message.startswith(place) and words in message and "\n" not in message


@pytest.mark.parametrize(
    "words",
    [
        ("cli/train_grpo.py", "--config-name"),
        ("cli/train_grpo.py", "--keys", "run", "--config-name"),
        ("cli/train_grpo.py", "--multirun", "seed=1,2", "--config-name"),
        ("tools/preflight.py", "--config-name"),
        ("tools/plan_layout.py", "--config-name"),
        ("examples/grpo/facts.py", "--config-name"),
    ],
)
def test_every_entry_says_it_in_a_line(own_configs, words):
    place, reason = write(own_configs, "twice")
    done = run_program(*words, "twice")
    assert done.returncode == 2 and done.stdout == "", done.stderr
    *before, last = done.stderr.splitlines()
    assert place in last and reason in last
    # argparse's own
    assert not before or before[0].startswith("usage: ")


def test_a_fault_of_a_part_is_named_with_the_parts_file(own_configs):
    part = own_configs / "aqn" / "broken.yaml"
    part.write_text("enabled: true\n  targets: [1\n")
    with pytest.raises(ConfigError) as refused:
        compose(TINY, ["aqn=broken"])
    assert str(refused.value).startswith(f"{part}: ") and TINY not in str(refused.value)


def test_a_broken_config_is_in_nobodys_way(own_configs):
    for name in BROKEN:
        write(own_configs, name)
    assert compose(TINY)["engine"] == "local"
    done = run_program("cli/train_grpo.py")
    assert done.returncode == 2 and "\n  latin " in done.stderr


@pytest.mark.parametrize("content", ["run: {root: [", "- 1\n"])
def test_a_run_whose_config_is_damaged_is_named(content, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "iter_0000001").mkdir(parents=True)
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text(content)
    words = ("tools/evaluate.py", "--run", run, "--step", "0")
    done = run_program(*words)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"{run}/config.yaml is damaged: " in done.stderr


# ---- paths ----

NO_PATHS = {
    "dtype",
    "context_parallel_algo",
    "engine",
    "filter_groups_metric",
    "prompt",
    "loss_mode",
    "name",
    "wandb_project",
}


def test_every_value_that_is_a_text_is_a_path_or_known_not_to_be():
    texts = {
        key_of(part, name).rpartition(".")[2]
        for part in PARTS.values()
        for name, field in part.__pydantic_fields__.items()
        if field.annotation in (str, str | None) and key_of(part, name)
    }
    assert texts - NO_PATHS <= PATHS


def path_of(own_configs, by, text):
    """The value of run.root where it is set to `text`."""
    own = f"run: {{root: '{text}'}}\n" if by == "file" else ""
    (own_configs / "mine.yaml").write_text(f"{ON}{own}")
    config = compose("mine", [f"run.root={text}"] if by == "override" else [])
    return config["run"]["root"]


@pytest.mark.parametrize("by", ["override", "file"])
@pytest.mark.parametrize(
    "text, path",
    [
        ("a/~/b", "a/~/b"),
        ("${oc.env:HOME}/x", "/home/me/x"),
        ("a$", "a$"),
        ("/数据/new dir", "/数据/new dir"),
        ("a (1)=b#c;d&e", "a (1)=b#c;d&e"),
        ("runs/2026-11-22_aqn=off", "runs/2026-11-22_aqn=off"),
    ],
)
def test_a_path_is_a_path(own_configs, monkeypatch, by, text, path):
    monkeypatch.setenv("HOME", "/home/me")
    assert path_of(own_configs, by, text) == path


@pytest.mark.parametrize(
    "override, values",
    [
        ("task.train_file='/a,b.jsonl','/数据'", ["/a,b.jsonl", "/数据"]),
        ("task.train_file=null,a", [None, "a"]),
        ("run.name=range(1,3)", [1, 2]),
        ("aqn.multipliers={a:1,b:2},null", [{"a": 1, "b": 2}, None]),
        ("run.name=${seed},x", [1, "x"]),
        ("run.root=", [""]),
        ('run.root="a b"', ["a b"]),
        ("run.root=a b", ["a b"]),
        ("task.train_file=it's", ["it's"]),
        ("run.root=a 'b' \"c\"", ["a 'b' \"c\""]),
    ],
)
def test_sweeps_lists_and_interpolations_stay_what_they_are(override, values):
    section, _, last = override.partition("=")[0].partition(".")
    configs = [compose(TINY, chosen) for chosen in combinations(TINY, [override])]
    assert [config[section][last] for config in configs] == values
