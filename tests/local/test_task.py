"""Questions as token ids: the plain form, and a model's own chat template, which may ask for the
date.
"""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.demo.tiny_model import build_tokenizer
from mindspeed_qerl.local import evaluate as evaluate_module
from mindspeed_qerl.local.engine import load_data
from mindspeed_qerl.runs import directory
from mindspeed_qerl.runs.directory import RunDirectory

from .conftest import recipe_of


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<eos>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}####{% endif %}"
    )
    return tokenizer


DATED = "{{ strftime_now('%Y %d %H') }} {% for m in messages %}<eos>{{ m['content'] }}{% endfor %}"


def test_the_date_in_a_prompt_is_that_of_the_runs_start(tokenizer, data_dir, tmp_path, monkeypatch):
    """A run that was started on another day is resumed, and evaluated, with the prompts that it
    had; with another tokenizer it is refused.
    """
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(SMALL))
    files = {"train": data_dir / "train_chat.parquet", "test": data_dir / "test_chat.parquet"}
    monkeypatch.setattr(directory, "_now", lambda: "2026-07-26T23:59:00+00:00")
    run = RunDirectory.create(tmp_path, "run", config={}, command=[], seed=1, data_files=files)
    recipe = SimpleNamespace(
        task=SimpleNamespace(
            train_file=files["train"],
            test_file=files["test"],
            prompt="chat",
            chat_template_kwargs=None,
        ),
        model=SimpleNamespace(path=str(tmp_path / "model")),
        sampling=SimpleNamespace(max_prompt_length=96),
        evaluation=SimpleNamespace(n_problems=None),
    )
    progress = SimpleNamespace(message=lambda text: None)
    first = load_data(recipe, run, progress)
    read = "".join(tokenizer.decode(first.train.prompts[0]).split())
    assert read.startswith("20262623"), read

    monkeypatch.setattr(directory, "_now", lambda: "2026-07-29T23:59:00+00:00")
    again = load_data(recipe, RunDirectory.open(run.path), progress)
    assert (again.train.prompts, again.test.prompts) == (first.train.prompts, first.test.prompts)

    asked = []
    monkeypatch.setattr(evaluate_module, "_merged", lambda *_: "")
    monkeypatch.setattr(
        evaluate_module, "_sampler", lambda *_: lambda prompts, *_: asked.append(prompts) or 1 / 0
    )
    what = evaluate_module.EvaluationJob(
        model=str(tmp_path / "model"), data=str(files["test"]), run=str(run.path)
    )
    with pytest.raises(ZeroDivisionError):
        evaluate_module.evaluate(what, tmp_path / "evaluation", lambda text: None)
    assert asked == [first.test.prompts]

    shutil.rmtree(tmp_path / "model")
    tokenizer.chat_template = DATED.replace("%H", "%H 7")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError, match="was started with other prompts, evaluation_prompts. What makes them"
    ):
        load_data(recipe, RunDirectory.open(run.path), progress)


SMALL = dict(
    model_type="qwen3_moe",
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    vocab_size=128,
)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({}, None),
        ({"head_dim": 80}, None),
        ({"head_dim": 16}, "head_dim = 16 must be one of 32, 64, 80,"),
        ({"head_dim": 48}, "head_dim = 48 must be one of 32"),
        ({"head_dim": 1024}, "head_dim = 1024 must be one of 32"),
        ({"hidden_size": 80}, "hidden_size = 80 must be a multiple of 32"),
        ({"moe_intermediate_size": 48}, "moe_intermediate_size = 48 must be a multiple of 32"),
    ],
)
def test_what_vllms_kernels_do_not_take_is_refused_before_anything_starts(
    tmp_path, data_dir, changed, message
):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changed))
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        recipe_of(tmp_path, data_dir)
