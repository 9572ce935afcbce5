"""The command line: usage, help, names of keys, any Python, an installation."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml

from mindspeed_qerl.common import entry
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.recipe.compose import CONFIGS, combinations, compose, list_of_keys
from tests import ROOT

TINY = "grpo_tiny_moe_cpu"


def run(*command, cwd=ROOT, **variables):
    environment = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    } | variables
    words = list(map(str, command))
    return subprocess.run(
        words, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def train(*arguments, cwd=ROOT):
    return run(sys.executable, ROOT / "cli" / "train_grpo.py", *arguments, cwd=cwd)


@pytest.mark.parametrize("arguments", [[], ["aqn=off"]])
def test_without_a_config_nothing_is_trained(arguments, tmp_path):
    done = train(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith("usage: train_grpo.py --config-name NAME [key=value ...]")
    listed = dict(
        line.split(maxsplit=1) for line in done.stderr.split("configs:\n")[1].splitlines()
    )
    first_lines = {file.stem: file.read_text().splitlines()[0] for file in CONFIGS.glob("*.yaml")}
    assert listed == {name: line.removeprefix("# ") for name, line in first_lines.items()}


def test_help_is_the_text_of_the_config_and_of_its_parts():
    """Asked for before the name, with another part chosen; of a config based on another."""
    done = train("aqn=off", "--help", "--config-name", TINY)
    assert done.returncode == 0 and "--multirun" in done.stdout
    assert (CONFIGS / f"{TINY}.yaml").read_text() in done.stdout
    assert (CONFIGS / "aqn" / "off.yaml").read_text() in done.stdout
    assert (CONFIGS / "aqn" / "qerl.yaml").read_text() not in done.stdout
    based = train("--help", "--config-name", "grpo_qwen3_30b_a3b_gsm8k_12npu").stdout
    assert (CONFIGS / "grpo_qwen3_30b_a3b_gsm8k_16npu.yaml").read_text() in based
    assert (CONFIGS / "model" / "qwen3_30b_a3b.yaml").read_text() in based


def test_help_is_quick():
    program = (
        "import runpy, sys; sys.argv = ['train_grpo.py', '--help', '--config-name', "
        f"'grpo_tiny_moe_cpu']\ntry: runpy.run_path({str(ROOT / 'cli/train_grpo.py')!r}, "
        "run_name='__main__')\nexcept SystemExit as stop: assert stop.code == 0\nheavy = "
        "{'pydantic', 'numpy', 'torch', 'rich'} & set(sys.modules); assert not heavy, "
        "heavy"
    )
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


def test_all_unknown_keys_are_named_at_once():
    """With the nearest; tests/recipe/test_reader.py has more of them."""
    done = train("--config-name", TINY, "lora_rank=8", "+megatron_training.train_itrs=4")
    assert done.returncode == 2 and done.stdout == ""
    assert (
        "error: unknown key 'lora_rank', did you mean 'megatron_training.lora_r'?\n" in done.stderr
    )
    assert "did you mean 'megatron_training.train_iters'?\n" in done.stderr


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_known_key_works_wherever_it_stands(prefix):
    """entropy_coeff and sampling_config.seed are upstream's, train_iters is in the YAML, rehearsal
    is not.
    """
    config = compose(
        TINY,
        [
            f"{prefix}rl_config.entropy_coeff=0.1",
            f"{prefix}generate_config.sampling_config.seed=3",
            f"{prefix}megatron_training.train_iters=7",
            f"{prefix}rehearsal.enabled=true",
        ],
    )
    assert (
        config["rl_config"]["entropy_coeff"] == 0.1
        and config["generate_config"]["sampling_config"]["seed"] == 3
    )
    assert config["megatron_training"]["train_iters"] == 7 and config["rehearsal"] == {
        "enabled": True
    }
    of_the_user = compose(TINY, ["aqn.multipliers.post_attention=2"])["aqn"]["multipliers"]
    assert of_the_user == {"post_attention": 2}
    assert "epochs" not in compose(TINY, ["~rl_config.epochs"])["rl_config"]


@pytest.mark.parametrize("prefix", ["", "+"])
def test_parts_of_configs(prefix):
    assert compose(TINY, [f"{prefix}aqn=off"])["aqn"]["enabled"] is False
    name = "grpo_qwen25_7b_gsm8k_8npu"
    assert "rollout_correction" not in compose(name)
    assert (
        compose(name, [f"{prefix}rollout_correction=token_tis"])["rollout_correction"]["method"]
        == "token_tis"
    )


@pytest.mark.parametrize(
    "override, message",
    [
        ("aqn=loud", "unknown aqn 'loud'. Known: mild, off, qerl, qerl_paper, qerl_scripts,"),
        ("aqn=5", "unknown aqn '5'. Known: mild, off, qerl, qerl_paper, qerl_scripts, strong"),
        ("aqn=off,qerl", "add --multirun"),
        ("seed=1,2", "add --multirun"),
        ("aqn", "'aqn' is not an override: write key=value, without dashes"),
        ("=5", "'=5' is not an override: write key=value, without dashes"),
        ("~run.nobody", "Could not delete from config. 'run.nobody' does not exist"),
        ("rl_config.epochs=[", "rl_config.epochs=[ is not read: quotes, commas"),
        ("task.prompt=${nowhere}", "nowhere"),
    ],
)
def test_an_override_that_cannot_be_is_refused_in_words(override, message):
    with pytest.raises(ConfigError) as error:
        compose(TINY, [override])
    assert message in str(error.value)


def test_the_resolved_config_is_printed():
    done = train("seed=3", "--cfg", "job", "-cn", f"{TINY}.yaml")
    assert yaml.safe_load(done.stdout) == compose(TINY, ["seed=3"])


def test_the_combinations_of_a_sweep():
    """Hydra's syntax: lists, ranges, globs of parts."""
    assert combinations(TINY, ["aqn=off,qerl", "seed=range(1,3)", "eval.every=5"]) == [
        [f"aqn={aqn}", f"seed={seed}", "eval.every=5"] for aqn in ("off", "qerl") for seed in (1, 2)
    ]
    assert combinations(TINY, ["rollout_correction=glob(*)"]) == [
        [f"rollout_correction={method}"]
        for method in sorted(file.stem for file in (CONFIGS / "rollout_correction").iterdir())
    ]
    for override, message in (("aqn=off,loud", "unknown aqn 'loud'"), ("sed=1,2", "key 'sed'")):
        done = train("--multirun", "--config-name", TINY, override)
        assert done.returncode == 2 and message in done.stderr
        # before the first run
        assert done.stdout == ""


def test_keys_with_values():
    listed = list_of_keys(TINY, "rl_config", ["rl_config.epochs=3"], None)
    values, others = listed.split("# not set: ")
    assert yaml.safe_load(values) == {
        "rl_config": compose(TINY, ["rl_config.epochs=3"])["rl_config"]
    }
    assert "entropy_coeff" in others.split(", ")
    assert "rl_config" in list_of_keys(TINY, "", [], None)
    with pytest.raises(ConfigError, match="unknown section 'rl_confg', did you mean 'rl_config'"):
        list_of_keys(TINY, "rl_confg", [], None)


def test_own_configs_lie_in_the_current_folder_or_where_config_dir_says(tmp_path, monkeypatch):
    """One of the user's own stands on the package's; its parts are looked for beside it first."""
    own = tmp_path / "configs"
    (own / "aqn").mkdir(parents=True)
    (own / "mine.yaml").write_text(f"# Mine.\ndefaults: [{TINY}, _self_]\nseed: 5\n")
    (own / "aqn" / "loud.yaml").write_text("# Loud.\n# @package aqn\nsigma_start: 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert (
        compose("mine")["seed"] == 5 and compose("mine")["rl_config"] == compose(TINY)["rl_config"]
    )
    assert compose(TINY, ["aqn=loud"])["aqn"] == {"sigma_start": 0.5}
    assert "mine" in train(cwd=tmp_path).stderr
    monkeypatch.chdir(ROOT)
    assert compose("mine", (), str(own))["seed"] == 5
    with pytest.raises(ConfigError, match="unknown config name 'mine'"):
        compose("mine")
    with pytest.raises(ConfigError, match="no such folder"):
        compose("mine", (), "nowhere")


def entries():
    """Every file and module that can be started, and prints."""
    for file in [ROOT / "cli" / "train_grpo.py", *TOOLS]:
        yield [file, "--help"]
    for file in sorted((ROOT / "mindspeed_qerl").rglob("*.py")):
        text = file.read_text()
        is_entry = '__name__ == "__main__"' in text and "print(" in text
        if is_entry and file.stem != "math_process":  # whose reader is a reward
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            yield ["-m", module, *(["--help"] if "argparse" in text else [])]


@pytest.mark.parametrize("words", entries(), ids=lambda words: str(words[-2:][0])[-20:])
def test_a_reader_that_leaves_early_ends_an_entry_quietly(words):
    reads, writes = os.pipe()
    os.close(reads)  # before the first word
    try:
        done = subprocess.run(
            [sys.executable, *words], check=False, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_broken_pipe_is_an_error(capfd):
    def main():
        print("said")
        raise BrokenPipeError("a worker's")

    with pytest.raises(BrokenPipeError, match="a worker's"):
        entry.quietly(main)
    assert entry.quietly(lambda: 3) == 3 and capfd.readouterr().out == "said\n"


GIVEN = ("--model", "m", "--data", "d", "--output", "o")


@pytest.mark.parametrize(
    "words, fault",
    [
        (
            ("--temperature", "0", *GIVEN),
            "--temperature 0.0: must be above 0 (greedy answers alone",
        ),
        (("--temperature", "nan", *GIVEN), "--temperature nan: must be a finite number"),
        (
            ("--problems", "0", "--samples", "-1", *GIVEN),
            "--problems 0: must be at least 1; --samples -1: must be at least 0",
        ),
        (("--max-num-seqs", "0", *GIVEN), "--max-num-seqs 0: must be at least 1"),
        (
            ("--hardware-error", "gaussian", "--gaussian-std", "2", *GIVEN),
            "--gaussian-std 2.0: must be below 1",
        ),
        (("--run", "r", "--name", "a/b"), "--name a/b: it becomes a folder"),
        (("--chat-template-kwargs", "[1]", *GIVEN), "[1] is no JSON object like {"),
    ],
)
def test_a_bad_value_of_an_option_is_named_in_words(words, fault):
    done = run(sys.executable, ROOT / "tools" / "evaluate.py", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert f"error: {fault}" in done.stderr.replace("argument --chat-template-kwargs: ", "")
    assert "pydantic" not in done.stderr and "Input should" not in done.stderr


@pytest.mark.parametrize(
    "override, message",
    [
        ("run.root=/proc/nope", "error: run.root = '/proc/nope': no folder can be made: "),
        ("run.root=README.md", "error: run.root = 'README.md': no folder can be made: "),
        ("run.name=a/b", "error: run.name = 'a/b': it becomes a folder: use letters"),
        (
            "task.prompt=chat task.chat_template_kwargs.enable_thinking=false",
            "error: task.chat_template_kwargs: models/tiny_qwen3_moe has no chat template that can",
        ),
        ("run.resume=/proc/nope", "error: run.resume = '/proc/nope': /proc/nope is not a run"),
    ],
)
def test_what_cannot_be_is_named_with_its_key_before_anything_starts(override, message):
    done = train("--config-name", TINY, *override.split())
    assert done.returncode == 2 and message in done.stderr and not (ROOT / "runs" / "a").exists()


# ---- any Python, any folder ----


@pytest.fixture
def bare_python(tmp_path):
    """A Python 3.11 without a single package, as the machine's own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.fixture
def checkout(tmp_path):
    """A checkout that no Python has installed."""
    for folder in ("cli", "tools", "configs", "mindspeed_qerl"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / "checkout" / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return tmp_path / "checkout"


def test_a_tool_starts_again_with_the_venv_of_its_checkout(bare_python, checkout, tmp_path):
    (checkout / ".venv").symlink_to(sys.prefix)
    tool = checkout / "tools" / "plan_layout.py"
    done = run(bare_python, "-u", tool, "--config-name", TINY, "seeed=1", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean 'seed'?" in done.stderr, done.stderr
    program = checkout / "tools" / "which.py"
    header = (
        tool.read_text().split("from mindspeed_qerl.common.errors")[0].split("import argparse")[1]
    )
    program.write_text(
        f"{header}import os, mindspeed_qerl\n"
        "print(sys.prefix, mindspeed_qerl.__file__, os.environ['PYTHONPATH'], sys.argv[1:])"
    )
    shown = run(bare_python, program, "a b", cwd=tmp_path).stdout.split(maxsplit=3)
    package = checkout / "mindspeed_qerl" / "__init__.py"
    assert shown == [str(checkout / ".venv"), str(package), str(checkout), "['a b']\n"]


TOOLS = sorted((ROOT / "tools").glob("*.py"))


@pytest.mark.parametrize("file", ["cli/train_grpo.py", "tools/plan_layout.py"])
def test_without_a_venv_a_sentence_says_what_to_do(file, bare_python, checkout, tmp_path):
    done = run(bare_python, checkout / file, "--help", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {bare_python} has no hydra, numpy,")
    assert "`make install` in a checkout" in done.stderr


def test_an_older_python_says_which_one_is_needed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(entry, "CHECKOUT", tmp_path)
    with monkeypatch.context() as older, pytest.raises(SystemExit) as refused:
        older.setattr(sys, "version_info", (3, 10, 13))
        entry.use_checkout()
    told = capsys.readouterr().err
    assert refused.value.code == 2 and len(told.splitlines()) == 1
    assert told.startswith(f"error: {sys.executable} is Python ") and "where 3.11 is needed" in told


def test_every_entry_starts_alike():
    """Any Python will do: what is imported before `use_checkout` is the standard library."""
    entries = [ROOT / "cli" / "train_grpo.py", ROOT / "examples" / "grpo" / "facts.py", *TOOLS]
    for file in entries:
        before, found, _ = file.read_text().partition("    use_checkout()\n")
        imports = [line for line in before.splitlines() if line.startswith(("import ", "from "))]
        imported = {line.split()[1].partition(".")[0] for line in imports}
        assert found and imported <= sys.stdlib_module_names, file


def test_an_installation_has_commands_and_configs(bare_python, checkout, tmp_path):
    """A wheel, in a folder of its own, used from another, with the packages of this Python."""
    for file in "setup.py pyproject.toml README.md requirements".split():
        (shutil.copytree if (ROOT / file).is_dir() else shutil.copy)(ROOT / file, checkout / file)
    built = run(
        sys.executable,
        *"-m pip wheel --no-deps --no-build-isolation -w".split(),
        tmp_path,
        checkout,
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    site = tmp_path / "site"
    archive.extractall(site)
    names = archive.namelist()
    assert {name for name in names if name.startswith("mindspeed_qerl/configs/")} == {
        f"mindspeed_qerl/configs/{file.relative_to(CONFIGS)}" for file in CONFIGS.rglob("*.yaml")
    }
    tables = (ROOT / "mindspeed_qerl").rglob("*.yaml")
    assert {str(file.relative_to(ROOT)) for file in tables} <= {*names}
    assert not any(
        name.startswith(("tests", "configs", "tools", "cli", "benchmarks")) for name in names
    )
    [commands] = site.glob("*/entry_points.txt")
    assert {f"qerl-{file.stem.replace('_', '-')}" for file in TOOLS} | {"qerl-train"} == {
        line.partition(" ")[0]
        for line in commands.read_text().splitlines()
        if line.startswith("qerl-")
    }

    start = "import sys; from mindspeed_qerl.common.entry import command; sys.argv = sys.argv[1:]; sys.exit(command())"

    def call(python, *words):
        return run(python, "-c", start, *words, cwd=tmp_path, PYTHONPATH=str(site))

    assert f"\n  {TINY} " in call(sys.executable, "bin/qerl-train").stderr
    judged = call(
        sys.executable, "bin/qerl-plan-layout", "--config-name", "grpo_qwen25_7b_gsm8k_8npu"
    )
    assert judged.returncode == 0 and "legal" in judged.stdout, judged.stderr
    lacking = call(
        bare_python, *"bin/qerl-export-adapter --checkpoint c --base b --output o".split()
    )
    assert lacking.returncode == 1 and "Traceback" not in lacking.stderr
    assert lacking.stderr.startswith(f"error: {bare_python} has no ")
