"""A narrow model of a given shape, with random weights and a tokenizer of its own: what a layout
divides stays.

Random weights on real questions would never be right, and equal rewards teach nothing: no gradient
would reach an adapter. So the model is made to answer with numbers that GSM8K has often: about one
answer in forty is right.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.files import new_directory
from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.families.config import is_old
from mindspeed_qerl.recipe.types import Layout
from mindspeed_qerl.tasks.rows import Row

VERSION = 4  # raised when what is made changes
HEAD_DIM = 32  # the smallest that vLLM's attention on CPUs takes
EXPERT_WIDTH = 32  # the multiple that its experts take
VOCABULARY = 4096  # enough for prompts about as long as with the real tokenizer
END = "<|im_end|>"
TURN = "<|im_start|>"
PAD = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def narrow(shape: ModelShape, layout: Layout, layers: int) -> ModelShape:
    """`shape` with small widths and vocabulary, and so many layers; heads, KV groups, experts and
    their top-k stay.
    """
    widths = math.lcm(layout.tp, layout.infer_tp)
    hidden = shape.num_attention_heads * HEAD_DIM
    if family_of(shape).own_head_dim:
        hidden = 2 * HEAD_DIM
    # as many times an expert's width as in the real model, to a multiple that is divided
    shared = shape.shared_expert_intermediate_size
    if shared:
        shared = EXPERT_WIDTH * widths * math.ceil(shared / shape.moe_intermediate_size / widths)
    return replace(
        shape,
        num_hidden_layers=layers,
        head_dim=HEAD_DIM,
        hidden_size=hidden,
        intermediate_size=shape.intermediate_size and EXPERT_WIDTH * widths,
        moe_intermediate_size=shape.moe_intermediate_size and EXPERT_WIDTH,
        shared_expert_intermediate_size=shared,
        vocab_size=math.lcm(VOCABULARY, widths),
        max_position_embeddings=4096,
    )


def make_model(shape: ModelShape, rows: Sequence[Row], root: Path) -> Path:
    """The directory of the model of `shape`, made below `root` unless it is there already; the
    tokenizer learns from the messages of `rows`, and the numbers that it says are their commonest
    answers.
    """
    task = [(row.messages, row.answer) for row in rows]
    made_of = json.dumps({"version": VERSION, "task": task, **asdict(shape)}, sort_keys=True)
    directory = root / f"{shape.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if (directory / "config.json").is_file():
        return directory
    print(
        f"Making {directory}: {shape.num_hidden_layers} layers, {shape.hidden_size} wide, "
        "random weights",
        flush=True,
    )
    with new_directory(directory) as making:
        texts = [turn["content"] for row in rows for turn in row.messages]
        tokenizer = train_tokenizer(texts, shape.vocab_size)
        _random_model(shape, tokenizer, [row.answer for row in rows]).save_pretrained(making)
        tokenizer.save_pretrained(making)
    return directory


def train_tokenizer(texts: Iterable[str], size: int):
    """A byte-level BPE tokenizer of `size` tokens learnt from `texts`, with Qwen's chat tokens and
    a chat template.
    """
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, size, min_frequency=0, show_progress=False, special_tokens=[PAD, TURN, END]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN],
        chat_template=TEMPLATE,
    )


def _random_model(shape: ModelShape, tokenizer, answers: list[str]):
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    rope: dict[str, Any] = {"rope_parameters": shape.rope}
    if is_old(transformers.__version__):
        rope = {"rope_theta": shape.rope_theta, "rope_scaling": shape.rope_scaling and shape.rope}
    config = transformers.AutoConfig.for_model(
        shape.model_type,
        **family_of(shape).hf_config(shape),
        **rope,
        initializer_range=0.05,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # The prompt's last token and the commonest answers share a direction: after the one, the
        # others are likely.
        common = {f" {answer}" for answer, _ in Counter(answers).most_common(8)}
        numbers = [token for token in range(len(tokenizer)) if tokenizer.decode([token]) in common]
        empty = [{"role": "user", "content": ""}]
        prompt = tokenizer.apply_chat_template(empty, add_generation_prompt=True, return_dict=False)
        direction = torch.nn.functional.normalize(torch.randn(shape.hidden_size), dim=0)
        embedding = model.get_input_embeddings().weight
        embedding[prompt[-1]] += 4 * direction
        # tied: more than the last token, which is likest to itself
        embedding[numbers] += 8 * direction
        # many layers of random additions would drown it
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight /= shape.num_hidden_layers
        if not shape.tie_word_embeddings:
            model.get_output_embeddings().weight[numbers] += direction
    return model
