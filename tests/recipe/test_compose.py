"""Configs as people write them: every fault of YAML or Hydra is a line with its file, at every
entry; paths are what is configured.
"""

import os
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe.compose import CONFIGS, PATHS, at, combinations, compose, text_of_config
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


@pytest.mark.parametrize("value", ["it's", 'say "hi"', "a]b", "it's $5", r"a\b'c", "x,y}"])
@pytest.mark.parametrize("key", ["run.name", "rl_config.filter_groups_metric"])
def test_what_hydra_does_not_read_is_refused_with_what_it_does(key, value):
    """As a shell would pass it on."""
    for refuses in (partial(compose, TINY), partial(combinations, TINY)):
        with pytest.raises(ConfigError) as refused:
            refuses([f"{key}={value}"])
        message = str(refused.value)
        assert message.startswith(f"{key}={value} is not read: ") and ".yaml" not in message
        [word] = shlex.split(message.partition("in a shell: ")[2])
        assert at(key, compose(TINY, [word])) == value


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


@pytest.mark.parametrize(
    "defaults, is_refused",
    [
        ("[base, _self_]", False),
        ("[base]", False),
        ("[base, override aqn: top, _self_]", False),
        ("[base, _self_, override aqn: top]", False),
        ("[_self_, base]", True),
        ("[_self_, aqn: top]", True),
    ],
)
def test_own_values_come_last(own_configs, defaults, is_refused):
    (own_configs / "base.yaml").write_text("defaults: [aqn: quiet, _self_]\nactor: {lr: 2e-4}\n")
    (own_configs / "aqn" / "quiet.yaml").write_text("enabled: false\n")
    (own_configs / "aqn" / "top.yaml").write_text("# @package _global_\nactor: {lr: 5e-4}\n")
    (own_configs / "mine.yaml").write_text(f"defaults: {defaults}\nactor: {{lr: 1e-3}}\n")
    if is_refused:
        with pytest.raises(ConfigError, match="put `_self_` last"):
            compose("mine")
    else:
        assert compose("mine")["actor"]["lr"] == 1e-3


def test_the_parts_that_the_command_line_chooses_count(own_configs):
    (own_configs / "mine.yaml").write_text(f"defaults: [{TINY}, _self_]\n")
    (own_configs / "aqn" / "bare.yaml").write_text("enabled: false\n")
    text = text_of_config("mine", ["aqn=bare"], None)
    files = [Path(line[5:]) for line in text.splitlines() if line.startswith("---- ")]
    assert files[0] == own_configs / "mine.yaml" and CONFIGS / f"{TINY}.yaml" in files
    assert own_configs / "aqn" / "bare.yaml" in files and CONFIGS / "aqn" / "qerl.yaml" not in files


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
        ("~", "/home/me"),
        ("~/a b", "/home/me/a b"),
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


@pytest.mark.parametrize("by", ["override", "file"])
@pytest.mark.parametrize("text", ["$HOME/x", "/data/$USER/x"])
def test_what_a_shell_would_have_expanded_is_refused(own_configs, by, text):
    with pytest.raises(ConfigError, match="write .*oc.env:NAME") as refused:
        path_of(own_configs, by, text)
    assert str(refused.value).startswith(f"run.root = '{text}' has a shell's variable")


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


# ---- numbers ----


@pytest.mark.parametrize(
    "written", ["040", "-017", "0_7_1", "010", "1:30", "-1:30", "1:30:00", "1:30.5"]
)
def test_a_number_that_yaml_reads_as_another_is_refused(own_configs, written):
    for form in ("seed: {}\n", "run: {{rollout_samples: {}}}\n", "aqn: {{targets: [a, {}]}}\n"):
        (own_configs / "mine.yaml").write_text(ON + form.format(written))
        with pytest.raises(ConfigError, match=r"mine.yaml:2: YAML reads .* as octal or base 60"):
            compose("mine")


@pytest.mark.parametrize(
    "written, value",
    [("007", 7), ("-0_7", -7), ("0x1F", 31), ("12:60", "12:60"), ("'040'", "040"), ("1e6", 1e6)],
)
def test_other_numbers_are_what_is_written(own_configs, written, value):
    (own_configs / "mine.yaml").write_text(f"{ON}seed: {written}\n")
    assert compose("mine")["seed"] == value
