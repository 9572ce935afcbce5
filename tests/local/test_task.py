"""Questions as token ids: the plain form, and a model's own chat template."""

import pytest

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.local.tiny_model import build_tokenizer
from mindspeed_qerl.tasks.prompts import Prompts
from mindspeed_qerl.tasks.rows import read_rows


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}<eos>{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}####{% endif %}")
    return tokenizer


def test_plain_prompts_are_the_question_and_a_newline(tokenizer, data_dir):
    path = data_dir / "train_chat.parquet"
    task = Prompts(path, tokenizer, "plain", 96)
    assert [tokenizer.decode(ids) for ids in task.prompts] == [row.columns["question"] + "\n"
                                                               for row in read_rows(path)]


def test_chat_prompts_keep_the_templates_special_tokens(tokenizer, data_dir):
    task = Prompts(data_dir / "test_chat.parquet", tokenizer, "chat", 96, limit=3)
    assert len(task.prompts) == 3
    for ids in task.prompts:
        assert ids[0] == tokenizer.eos_token_id and tokenizer.decode(ids[-1]) == "####"


def test_long_prompts_are_left_out_and_counted(tokenizer, data_dir):
    path = data_dir / "train_chat.parquet"
    lengths = sorted(len(ids) for ids in Prompts(path, tokenizer, "plain", 96).prompts)
    task = Prompts(path, tokenizer, "plain", lengths[0])
    assert task.dropped == sum(length > lengths[0] for length in lengths) > 0
    with pytest.raises(ConfigError, match="is longer than rl_config.max_prompt_length = 3 tokens"):
        Prompts(path, tokenizer, "plain", 3)
