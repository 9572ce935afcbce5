"""Configs as people write them: every fault of YAML or Hydra is a line with its place, at every
entry; what is configured, paths and numbers too, is what happens.
"""

import os
import random
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from mindspeed_qerl.common import entry
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe import compose as module
from mindspeed_qerl.recipe.compose import (
    CONFIGS,
    combinations,
    compose,
    config_parts,
    read_yaml,
)
from mindspeed_qerl.recipe.overrides import PATHS
from mindspeed_qerl.recipe.reader import key_of, read
from mindspeed_qerl.recipe.types import PARTS

ROOT = Path(__file__).parents[2]
REFUSED = object()
TINY = "grpo_tiny_moe_cpu"
NPU = "grpo_qwen25_7b_gsm8k_8npu"


@pytest.fixture(autouse=True)
def own_configs(tmp_path, monkeypatch):
    """A folder `configs` of the user's, where the commands run."""
    (tmp_path / "configs" / "aqn").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    module._warn.cache_clear()
    return tmp_path / "configs"


def started(monkeypatch, capsys, *words) -> tuple[int, str, str]:
    """(exit status, output, errors) of a program of this checkout."""
    file, *arguments = words
    monkeypatch.setattr(sys, "argv", [str(ROOT / file), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    return end.value.code, *capsys.readouterr()


# ---- faults ----

ON = "defaults: [grpo_qwen25_7b_gsm8k_8npu, _self_]\n"
# name of a config: its text, the line at fault (0: Hydra does not say), and words about it
BROKEN = {
    "twice": (ON + "seed: 1\nseed: 2\n", 3, "duplicate key seed"),
    "itself": ("defaults: [itself, _self_]\n", 0, "leads back to itself"),
    "circle": ("defaults: [circle_too, _self_]\n", 0, "leads back to itself"),
    "tab": ("run:\n\tname: a\n", 2, "not with tabs"),
    "bracket": (ON + "run: {name: a\n", 3, "expected ',' or '}'"),
    "latin": (ON + "run: {name: caf\xe9}\n", 0, "save the file as UTF-8"),
    "utf16": (ON, 0, "save the file as UTF-8"),
    "control": (ON + "run: {name: a\x07}\n", 0, "special characters are not allowed"),
    "list": ("- seed\n- 1\n", 1, "must be a mapping"),
    "text": ("\nseed=1\n", 2, "must be a mapping"),
    "documents": (ON + "---\nseed: 1\n", 2, "another document"),
    "alias": (ON + "run: {name: *nobody}\n", 2, "undefined alias"),
    "ring": (ON + "run: &a\n  root: *a\n", 0, "leads back to itself"),
    "tag": (ON + "run: {name: !mine a}\n", 2, "could not determine a constructor"),
    "key": (ON + "? [a, b]\n: 1\n", 2, "unhashable key"),
    "defaults_pairs": ("defaults:\n  aqn: qerl\n", 0, "must be a list"),
    "defaults_two": ("defaults:\n  - {aqn: qerl, run: none}\n", 0, "Too many keys"),
    "defaults_bool": ("defaults:\n  - aqn: off\n", 2, "write 'off'"),
    "self_twice": ("defaults: [_self_, grpo_tiny_moe_cpu, _self_]\n", 0, "Duplicate _self_"),
    "no_base": ("defaults:\n  - _self_\n  - grpo_tny_moe_cpu\n", 0, "'grpo_tny_moe_cpu'"),
    "no_option": (
        "defaults:\n  - grpo_tiny_moe_cpu\n  - override aqn: loud\n",
        0,
        "Could not find 'aqn/loud' Available options in 'aqn': mild",
    ),
    "nowhere": (ON + "run:\n  root: ${nobody}\n", 3, "run.root: Interpolation key 'nobody' not"),
    "shell": (ON + "run: {root: '${HOME}/runs'}\n", 2, "${oc.env:HOME}"),
    "half": (ON + "run: {root: '${run'}\n", 2, "run.root: no viable alternative"),
    "missing": (ON + "local:\n  kv_cache_gib: ???\n", 3, "local.kv_cache_gib=VALUE"),
    "octal": (ON + "seed: 040\n", 2, "YAML reads 040 as octal"),
    "base_60": (ON + "run: {rollout_samples: 1:30}\n", 2, "YAML reads 1:30 as base 60"),
    "part": (ON.replace(", _self_", ", override aqn: mine, _self_"), 3, "duplicate key enabled"),
}


def write(folder: Path, name: str) -> tuple[str, str]:
    """Make a broken config; (the place that has to be named, the word about it)."""
    text, line, word = BROKEN[name]
    encoding = {"latin": "latin-1", "utf16": "utf-16"}.get(name, "utf-8")
    (folder / f"{name}.yaml").write_bytes(text.encode(encoding))
    (folder / "circle_too.yaml").write_text("defaults: [circle, _self_]\n")
    (folder / "aqn" / "mine.yaml").write_text("# Mine.\nenabled: false\nenabled: true\n")
    file = folder / ("aqn/mine.yaml" if name == "part" else f"{name}.yaml")
    return f"{file}:{line}: " if line else f"{file}: ", word


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_of_a_config_is_a_line_with_its_place(own_configs, name):
    place, word = write(own_configs, name)
    with pytest.raises(ConfigError) as refused:
        compose(name)
    message = str(refused.value)
    assert message.startswith(place) and word in message and "\n" not in message


ENTRIES = {  # each with the words before and behind the name of a config
    "train": ("cli/train_grpo.py", "--config-name"),
    "print": ("cli/train_grpo.py", "--cfg", "job", "--config-name"),
    "keys": ("cli/train_grpo.py", "--keys", "run", "--config-name"),
    "sweep": ("cli/train_grpo.py", "--multirun", "seed=1,2", "--config-name"),
    "preflight": ("tools/preflight.py", "--config-name"),
    "plan": ("tools/plan_layout.py", "--config-name"),
    "launcher": ("examples/grpo/facts.py", "--config-name"),
}


@pytest.mark.parametrize("name", ["circle", "part"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_says_it_in_a_line(own_configs, monkeypatch, capsys, entry, name):
    place, word = write(own_configs, name)
    status, output, errors = started(monkeypatch, capsys, *ENTRIES[entry], name)
    assert status == 2 and output == "", errors
    *before, last = errors.splitlines()
    assert place in last and word in last
    assert not before or before[0].startswith("usage: "), "argparse's own"


def test_a_broken_config_is_in_nobodys_way(own_configs, monkeypatch, capsys):
    for name in BROKEN:
        write(own_configs, name)
    (own_configs / "folder.yaml").mkdir()
    assert compose(TINY)["engine"] == "local"
    status, _, errors = started(monkeypatch, capsys, "cli/train_grpo.py")
    assert (
        status == 2 and "\n  latin " in errors and "folder" not in errors.partition("configs:\n")[2]
    )


@pytest.mark.parametrize("content", ["run: {root: [", "- 1\n", "", "seed: &a [*b]\n"])
def test_a_run_whose_config_is_damaged_is_named(content, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "iter_0000001").mkdir(parents=True)
    (run / "status.json").write_text("{}")
    (run / "config.yaml").write_text(content)
    status, _, errors = started(
        monkeypatch, capsys, "tools/evaluate.py", "--run", run, "--step", "0"
    )
    assert (
        status == 1
        and len(errors.splitlines()) == 1
        and f"{run}/config.yaml is damaged: " in errors
    )


# ---- what overrides what ----


@pytest.mark.parametrize(
    ("entry", "status"),
    [("print", 0), ("plan", 0), ("launcher", 0), ("preflight", 0), ("train", 2)],
)
def test_every_entry_says_that_own_values_are_overridden(
    own_configs, monkeypatch, capsys, entry, status
):
    (own_configs / "mine.yaml").write_text(
        f"defaults: [_self_, {NPU}]\nactor_config: {{lr: 1e-3}}\n"
    )
    more = {"preflight": ["--print-conversion"], "train": ["run.prove_every=0"]}.get(
        entry, []
    )  # the last is refused
    done = started(monkeypatch, capsys, *ENTRIES[entry], "mine", *more)
    warning = (
        f"Warning: {own_configs / 'mine.yaml'}: its own values (actor_config.lr) are overridden"
    )
    assert done[0] == status and done[2].count(warning) == 1


PLACES = {
    "base.yaml": "actor: {lr: 2e-4, decay: 0.1}\naqn: {enabled: true}\n",
    "with_aqn.yaml": "defaults: [{aqn: quiet}, _self_]\n",
    "upon.yaml": "defaults: [base, _self_]\nother: 1\n",
    "aqn/quiet.yaml": "enabled: false\n",
    "aqn/top.yaml": "# @package _global_\nactor: {lr: 5e-4}\n",
}


@pytest.mark.parametrize(
    ("defaults", "own", "overridden"),
    [
        ("[base, _self_]", "actor: {lr: 1e-3}", ""),
        ("[base]", "actor: {lr: 1e-3}", ""),
        ("[_self_, base]", "actor: {lr: 1e-3, decay: 0.1}", "actor.lr"),
        ("[_self_, upon]", "actor: {lr: 1e-3}", "actor.lr"),
        ("[_self_, upon]", "other: 2", "other"),
        ("[_self_, {aqn: quiet}]", "aqn: {enabled: maybe, mine: 1}", "aqn.enabled"),
        ("[{aqn: quiet}, _self_]", "aqn: {enabled: maybe}", ""),
        ("[_self_, {aqn: top}]", "actor: {lr: 1e-3}", "actor.lr"),
        ("[_self_, with_aqn, {override aqn: top}]", "actor: {lr: 1e-3}", "actor.lr"),
        ("[_self_, {optional aqn: nobody}]", "aqn: {enabled: maybe}", ""),
        ("[_self_, base]", "actor: {}", ""),
    ],
)
def test_own_values_that_are_overridden_are_named(tmp_path, capsys, defaults, own, overridden):
    for name, text in {**PLACES, "mine.yaml": f"defaults: {defaults}\n{own}\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    compose("mine", (), str(tmp_path))
    said = capsys.readouterr().err
    assert (f"{tmp_path}/mine.yaml: its own values ({overridden}) are" in said) == bool(overridden)
    assert bool(said) == bool(overridden)


def test_the_parts_that_the_command_line_chooses_count(own_configs, capsys):
    (own_configs / "mine.yaml").write_text(f"defaults: [_self_, {TINY}]\naqn: {{sigma_end: 0.1}}\n")
    (own_configs / "aqn" / "bare.yaml").write_text("enabled: false\n")
    compose("mine", ["aqn=bare"])
    assert capsys.readouterr().err == ""
    parts = config_parts("mine", ["aqn=bare"])
    assert parts[0].file == own_configs / "mine.yaml"
    assert own_configs / "aqn" / "bare.yaml" in [part.file for part in parts]
    for file in CONFIGS.glob("*.yaml"):
        compose(file.stem)
    assert capsys.readouterr().err == "", "no shipped config overrides its own values"


# ---- numbers and words ----

NUMBERS = [  # as written; what it is, or REFUSED: refused with its line
    ("040", REFUSED),
    ("-017", REFUSED),
    ("0_7_1", REFUSED),
    ("1:30", REFUSED),
    ("1:30:00", REFUSED),
    ("-1:30", REFUSED),
    ("1:30.5", REFUSED),
    ("010", REFUSED),
    ("007", 7),
    ("-0_7", -7),
    ("0o17", "0o17"),
    ("08", "08"),
    ("0", 0),
    ("00", 0),
    ("0x1F", 31),
    ("0b11", 3),
    ("1_000", 1000),
    ("+5", 5),
    ("1e6", 1e6),
    ("5e-6", 5e-6),
    ("1E6", 1e6),
    (".5", 0.5),
    ("1.", 1.0),
    ("01.5", 1.5),
    ("2024-01-01", "2024-01-01"),
    ("12:60", "12:60"),
    ("fd00::5", "fd00::5"),
    ("'040'", "040"),
    ('"1:30"', "1:30"),
    ("yes", True),
    ("off", False),
    ("'off'", "off"),
    ("y", "y"),
    ("1.2.3", "1.2.3"),
]


@pytest.mark.parametrize(("written", "value"), NUMBERS)
def test_a_number_is_what_is_written(tmp_path, written, value):
    """As a value, in a list and as a key; what is read is what Hydra reads."""
    file = tmp_path / "a.yaml"
    for form in ("a:\n  b: {}\n", "a:\n- {}\n", "a: # b\n  {}: b\n"):
        file.write_text(form.format(written))
        if value is REFUSED:
            with pytest.raises(
                ConfigError, match=rf"a.yaml:2: YAML reads {written} as (octal|base 60)"
            ):
                read_yaml(file)
            continue
        read_back = read_yaml(file)[1]["a"]
        found = next(iter(read_back.values() if "b: " in form else read_back))
        assert found == value and type(found) is type(value)
        assert OmegaConf.to_container(OmegaConf.load(file)) == {"a": read_back}


def test_a_word_that_yaml_takes_for_another_is_refused_with_the_reason(own_configs):
    (own_configs / "mine.yaml").write_text(
        f"defaults: [{TINY}, _self_]\nrun: {{name: off, tensorboard: no}}\ntask: {{prompt: yes}}\n"
    )
    recipe, found = read(compose("mine"))
    assert [
        (fault.key, fault.message.partition(",")[0], "quotes" in fault.fix)
        for fault in found.faults
    ] == [
        ("task.prompt", "task.prompt: unknown prompt True. Known: chat", True),
        ("run.name", "run.name = False must be str", True),
    ] and not recipe.run.tensorboard


# ---- paths ----

NO_PATHS = {
    "dtype",
    "context_parallel_algo",
    "engine",
    "filter_groups_metric",
    "prompt",
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
    assert texts - NO_PATHS <= PATHS and texts & NO_PATHS <= NO_PATHS


PATH_KEYS = [
    "megatron_training.tokenizer_name_or_path",
    "actor_config.load",
    "actor_config.data_path",
    "task.train_file",
    "task.test_file",
    "aqn.multipliers_file",
    "run.root",
    "run.resume",
    "rehearsal.models",
    "generate_config.eplb_token_save_path",
]


def paths_of(own_configs: Path, by: str, text: str, keys: list[str] = PATH_KEYS) -> list[str]:
    """The values of `keys` where each is set to `text`."""
    pairs = [key.split(".") for key in keys]
    lines = "".join(
        f"{section}: {{}}\n" for section in dict.fromkeys(section for section, _ in pairs)
    )
    for section, last in pairs:
        lines = lines.replace(f"{section}: {{", f"{section}: {{{last}: '{text}', ")
    (own_configs / "mine.yaml").write_text(
        f"defaults: [{TINY}, _self_]\n{lines if by == 'file' else ''}"
    )
    config = compose("mine", [f"{key}={text}" for key in keys] if by == "override" else [])
    return [config[section][last] for section, last in pairs]


@pytest.mark.parametrize("by", ["override", "file"])
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~", "/home/me"),
        ("~/a b", "/home/me/a b"),
        ("a/~/b", "a/~/b"),
        ("~root/x", "/root/x"),
        ("./~x", "./~x"),
        ("${oc.env:HOME}/x", "/home/me/x"),
        ("a$", "a$"),
    ],
)
def test_a_path_is_a_path(own_configs, monkeypatch, by, text, path):
    monkeypatch.setenv("HOME", "/home/me")
    assert {path} == set(paths_of(own_configs, by, text))


@pytest.mark.parametrize(
    ("text", "word"),
    [("$HOME/x", "oc.env:HOME"), ("/data/$USER/x", "oc.env:USER"), ("~nobody_here/x", "home of a")],
)
def test_what_a_shell_would_have_expanded_is_refused(own_configs, text, word):
    for by, key in (("override", "run.root"), ("file", "actor_config.load")):
        with pytest.raises(ConfigError, match=word) as refused:
            paths_of(own_configs, by, text, [key])
        assert str(refused.value).startswith(f"{key} = '{text}' ")


def test_a_folder_may_have_the_name_of_a_variable(own_configs):
    for name in ("$HOME", "~nobody_here"):
        Path(name).mkdir()
        assert paths_of(own_configs, "override", f"{name}/x", ["run.root"]) == [f"{name}/x"]


def test_a_tilde_behind_an_option_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(
        sys, "argv", ["tool", "--output=~/x", "run.root=~/x", "~aqn", "--name=a~b", "--run", "~"]
    )
    entry.use_checkout()
    assert sys.argv[1:] == [
        "--output=/home/me/x",
        "run.root=~/x",
        "~aqn",
        "--name=a~b",
        "--run",
        "~",
    ]


ALPHABETS = ["ab ,()[]{}'\"", "a=#$&;\\ :|<>?*!^`%@+-~", "abé数😀(，)'=,\\$#&; "]


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_a_path_that_is_there_is_read_as_it_is_typed(tmp_path, monkeypatch, capsys, alphabet):
    """Through the command line, as `--cfg job` prints it."""
    draw = random.Random(alphabet)
    keys = [
        "task.train_file",
        "task.test_file",
        "run.root",
        "actor_config.load",
        "aqn.multipliers_file",
        "megatron_training.tokenizer_name_or_path",
    ]
    names = {"".join(draw.choices(alphabet, k=draw.randint(1, 8))) for _ in range(24)}
    names = sorted(name for name in names if name.strip(".") and not name.startswith("~"))
    for name in names:
        (tmp_path / name).touch()
    for start in range(0, len(names), len(keys)):
        paths = dict(zip(keys, names[start : start + len(keys)]))
        typed = {
            key: f"{tmp_path}/{name}" if draw.random() < 0.5 or name == "null" else name
            for key, name in paths.items()
        }
        status, output, errors = started(
            monkeypatch,
            capsys,
            "cli/train_grpo.py",
            "--config-name",
            TINY,
            "--cfg",
            "job",
            *(f"{key}={path}" for key, path in typed.items()),
        )
        assert status == 0, (errors, typed)
        read_back = yaml.safe_load(output)
        assert {
            key: read_back[key.partition(".")[0]][key.partition(".")[2]] for key in typed
        } == typed


@pytest.mark.parametrize(
    "name", ["数据/new dir", "it's", "a (1)", "a=b", "a#b;c&d", "a[x]", 'say "a"', "a{b<a>|b"]
)
def test_a_path_that_is_not_there_yet_is_read_too(name):
    assert compose(TINY, [f"run.root=/{name}/runs"])["run"]["root"] == f"/{name}/runs"
    assert compose(TINY, [f"run.root={name}"])["run"]["root"] == name


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("task.train_file='/a,b.jsonl','/数据'", ["/a,b.jsonl", "/数据"]),
        ("task.train_file=null,a", [None, "a"]),
        ("run.name=range(1,3)", [1, 2]),
        ("run.name=a,b", ["a", "b"]),
        ("aqn.multipliers={a:1,b:2},null", [{"a": 1, "b": 2}, None]),
        ("run.name=${seed},x", [1, "x"]),
        ("run.wandb_project=my project (1)", ["my project (1)"]),
        ("task.train_file=${run.root}/数据", ["runs/数据"]),
        ("run.root=", [""]),
        ('run.root="a b"', ["a b"]),
        ("run.root=a\\,b", ["a,b"]),
    ],
)
def test_sweeps_lists_and_interpolations_stay_what_they_are(override, values):
    section, _, last = override.partition("=")[0].partition(".")
    assert [
        compose(TINY, chosen)[section][last] for chosen in combinations(TINY, [override])
    ] == values


@pytest.mark.parametrize(
    "override",
    [
        "run.root='a",
        "rl_config.verifier_weight=[1,2",
        "aqn.multipliers={a:1",
        "run.name=choice(a",
        "run.name=f(",
    ],
)
def test_what_hydra_cannot_read_is_said_in_a_line(override):
    try:
        value = compose(TINY, [override])["run"]["root"]
    except ConfigError as error:
        assert (
            "\n" not in str(error)
            and f"with {override}" in str(error)
            and "quotes within quotes" in str(error)
        )
    else:
        assert override == "run.root='a" and value == "'a"
