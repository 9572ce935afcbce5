"""The command line as a new user meets it: usage, help, names of keys, any Python, an installation in another folder."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.recipe.compose import CONFIGS, combinations, compose
from mindspeed_qerl.recipe.describe import comments, list_of_keys
from mindspeed_qerl.recipe.overrides import checked, nearest

ROOT = Path(__file__).parents[1]
TINY = "grpo_tiny_moe_cpu"


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    return subprocess.run(list(map(str, command)), check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def train(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return run(sys.executable, ROOT / "cli" / "train_grpo.py", *arguments, cwd=cwd)


@pytest.mark.parametrize("arguments", [[], ["aqn=off"]])
def test_without_a_config_nothing_is_trained(arguments, tmp_path):
    done = train(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
    assert done.stderr.startswith("usage: train_grpo.py --config-name NAME [key=value ...]")
    listed = dict(line.split(maxsplit=1) for line in done.stderr.split("configs:\n")[1].splitlines())
    assert listed == {file.stem: file.read_text().splitlines()[0].removeprefix("# ") for file in CONFIGS.glob("*.yaml")}


def test_help_is_the_text_of_the_config_and_of_its_parts():
    """Asked for before the name, with another part chosen, and for a config that stands on another."""
    done = train("aqn=off", "--help", "--config-name", TINY)
    assert done.returncode == 0 and "--multirun" in done.stdout
    assert (CONFIGS / f"{TINY}.yaml").read_text() in done.stdout and (CONFIGS / "aqn" / "off.yaml").read_text() in done.stdout
    assert (CONFIGS / "aqn" / "qerl.yaml").read_text() not in done.stdout
    based = train("--help", "--config-name", "grpo_qwen3_30b_a3b_gsm8k_12npu").stdout
    assert (CONFIGS / "grpo_qwen3_30b_a3b_gsm8k_16npu.yaml").read_text() in based
    assert (CONFIGS / "model" / "qwen3_30b_a3b.yaml").read_text() in based


def test_help_is_quick():
    program = ("import runpy, sys; sys.argv = ['train_grpo.py', '--help', '--config-name', 'grpo_tiny_moe_cpu']\n"
               f"try: runpy.run_path({str(ROOT / 'cli/train_grpo.py')!r}, run_name='__main__')\n"
               "except SystemExit as stop: assert stop.code == 0\n"
               "heavy = {'hydra', 'pydantic', 'numpy', 'torch', 'rich'} & set(sys.modules); assert not heavy, heavy")
    done = run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("override", "meant"), [
    ("megatron_training.train_itrs=4", ["megatron_training.train_iters"]),
    ("+megatron_training.train_itrs=4", ["megatron_training.train_iters"]),
    ("~megatron_training.train_itrs", ["megatron_training.train_iters"]),
    ("megatron_trainin.train_iters=4", ["megatron_training.train_iters"]),
    ("lora_rank=8", ["megatron_training.lora_r"]),
    ("rl_config.lora_rank=8", ["megatron_training.lora_r"]),
    ("rl_config.entropy_coef=0", ["rl_config.entropy_coeff"]),  # not set in the YAML
    ("rl_config.actor_resource.num_npu=2", ["rl_config.actor_resource.num_npus"]),
    ("generate_config.temprature=1", ["generate_config.sampling_config.temperature"]),
    ("aqn.noise_seed=1", ["megatron_training.seed"]),
    ("seeed=2", ["seed"]),
    ("learning_rate=1e-5", ["actor_config.lr"]),
    ("megatron_training.learning_rate=1e-5", ["actor_config.lr"]),
    ("num_generations=4", ["rl_config.n_samples_per_prompt"]),
    ("actor_rollout_ref.rollout.n=4", ["rl_config.n_samples_per_prompt"]),
    ("beta=0.1", ["rl_config.init_kl_coef"]),
    ("algorithm.kl_ctrl.kl_coef=0.1", ["rl_config.init_kl_coef"]),
    ("max_completion_length=64", ["generate_config.sampling_config.max_tokens"]),
    ("eval_steps=5", ["eval.every"]),
    ("qwertyuiop=1", []),
])
def test_an_unknown_key_is_refused_with_the_nearest(override, meant):
    with pytest.raises(ConfigError) as error:
        compose(TINY, [override])
    first, listing = str(error.value).splitlines()
    assert first.startswith(f"unknown key '{override.lstrip('+~').partition('=')[0]}'")
    assert [name for name in first.split("'")[3::2]] == meant
    assert listing == f"`python cli/train_grpo.py --config-name {TINY} --keys [SECTION]` lists the known keys"
    assert "use +" not in str(error.value)
