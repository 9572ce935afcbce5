"""A real language model on real GSM8K questions and solutions: vLLM, Megatron ranks, PEFT and
transformers agree.

`pytest -m real` needs `make real-model` and data/gsm8k (docs/evaluation.md). REAL_MODEL: another
directory.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.lora.export import save_merged, save_peft
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.tasks.prompts import Prompts
from tests import ROOT

from ..local.conftest import batch_of, engine_logprobs, run_ranks

MODEL = Path(os.environ.get("REAL_MODEL", ROOT / "models" / "smollm2_135m_instruct")).resolve()
DATA = ROOT / "data" / "gsm8k"
# of a float32 logprob: 30 layers summed in another order differ by less, a wrong weight by far more
NEAR = 1e-4
ROWS = 4

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"no {MODEL}: make real-model"),
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}: tools/convert_gsm8k.py makes it"),
]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def task(tokenizer):
    return Prompts(DATA / "test_chat.parquet", tokenizer, "chat", max_prompt_length=256, limit=ROWS)


@pytest.fixture(scope="module")
def batch(task, tokenizer):
    """The dataset's own solutions as answers, by turns good and bad."""
    answers = [
        [*tokenizer.encode(row.columns["solution"]), tokenizer.eos_token_id] for row in task.rows
    ]
    advantages = np.resize([1.0, -1.0], ROWS)
    return batch_of(task.prompts, answers, advantages=advantages)


def sequences(batch):
    return [tokens[:length].tolist() for tokens, length in zip(batch.tokens, batch.lengths)]


def transformers_logprobs(model, batch):
    """float32 [N, L-1] of the answers' tokens, 0 elsewhere, by a model or one in a directory; row
    by row.
    """
    from transformers import AutoModelForCausalLM

    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    whole = np.zeros(batch.mask.shape, dtype=np.float32)
    for row, sequence in enumerate(sequences(batch)):
        tokens = torch.tensor([sequence])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        whole[row, : len(sequence) - 1] = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
    return whole * batch.mask


@pytest.fixture(scope="module")
def expected(batch):
    return transformers_logprobs(MODEL, batch)


def test_a_chat_prompt_holds_the_question_and_ends_where_the_answer_begins(task, tokenizer):
    for row, prompt in zip(task.rows, task.prompts):
        system, user, assistant = tokenizer.decode(prompt).split("<|im_start|>")[1:]
        assert system.startswith("system\n") and assistant == "assistant\n"
        assert user.startswith(f"user\n{row.question}") and user.endswith('"####".<|im_end|>\n')
    assert tokenizer.eos_token == "<|im_end|>"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12"))
    assert tokens == ["a", "ĠĠ", "1", "2"]  # each digit a token, as in its training


def test_the_solutions_are_likelier_than_chance(expected, batch):
    assert (
        -2.5 < expected[batch.mask].mean() < -0.3
    )  # a vocabulary of 49,152: a broken model is at -10.8 or below


def test_logprobs_of_vllm(expected, batch):
    from mindspeed_qerl.local.rollout import RolloutEngine

    engine = RolloutEngine(
        str(MODEL), "float32", max_model_len=512, max_num_seqs=ROWS, kv_cache_gib=1
    )
    for row, logprobs in enumerate(engine_logprobs(engine, sequences(batch))):
        mask = batch.mask[row, : len(logprobs)]
        assert (
            np.abs(np.array(logprobs, dtype=np.float32) - expected[row, : len(logprobs)])[
                mask
            ].max()
            < NEAR
        )


def small_recipe(ranks):
    """The shipped config's, in float32, with an update that can be seen, on `ranks` tensor parallel
    ranks.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        config = compose(
            "grpo_smollm2_135m_gsm8k_cpu",
            [
                f"megatron_training.tokenizer_name_or_path={MODEL}",
                f"task.train_file={DATA}/train_chat.parquet",
                f"task.test_file={DATA}/test_chat.parquet",
                "generate_config.dtype=float32",
                "generate_config.sampling_config.temperature=1",
                "actor_config.lr=1e-3",
                "megatron_training.global_batch_size=2",
                "rl_config.mini_batch_size=2",
                "rl_config.n_samples_per_prompt=2",
                "actor_config.micro_batch_size=2",
                f"rl_config.actor_resource.num_npus={ranks}",
                f"actor_config.tensor_model_parallel_size={ranks}",
            ],
        )
    return read_recipe(OmegaConf.to_container(config, resolve=True))


def train_rank(start, recipe, batch, parts):
    """Logprobs before and after two updates, and the parts of a checkpoint; in a process of its
    own.
    """
    trainer = start(recipe)
    before = trainer.logprobs(batch)
    for _ in range(2):  # the first moves B alone, which is zero before it
        trainer.train(batch)
    parts.mkdir(exist_ok=True)
    trainer.save(parts)
    return before, trainer.logprobs(batch)


@pytest.fixture(scope="module", params=[1, 3], ids=["one rank", "TP 3"])
def trained(request, batch, tmp_path_factory):
    """(logprobs before, logprobs after, adapters) of Megatron ranks; 3 share the 3 KV heads."""
    folder, recipe = tmp_path_factory.mktemp("ranks"), small_recipe(request.param)
    (before, after), *_ = run_ranks(train_rank, request.param, recipe, batch, folder / "parts")
    describe = checkpoint.describe(read_shape(MODEL), recipe.lora)
    checkpoint.save(
        folder / "checkpoints",
        2,
        describe,
        lambda making: shutil.copytree(folder / "parts", making, dirs_exist_ok=True),
        keep=1,
    )
    adapters = checkpoint.load_adapters(folder / "checkpoints", MODEL)
    return before * batch.mask, after * batch.mask, adapters


def test_logprobs_of_megatron_ranks(trained, expected):
    before, _, _ = trained
    assert np.abs(before - expected).max() < NEAR


def test_the_adapter_in_peft_and_the_merged_model_are_the_trained_policy(
    trained, expected, batch, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, after, adapters = trained
    save_peft(adapters, MODEL, tmp_path / "adapter")
    save_merged(adapters, MODEL, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = transformers_logprobs(tmp_path / "merged", batch)
    assert np.abs(merged - after).max() < NEAR
    assert np.abs(transformers_logprobs(with_peft, batch) - merged).max() < NEAR
    good, bad = np.arange(ROWS) % 2 == 0, np.arange(ROWS) % 2 == 1
    moved = after.sum(1) - expected.sum(1)
    assert moved[good].min() > 0 > moved[bad].max()  # it learned what the advantages said
