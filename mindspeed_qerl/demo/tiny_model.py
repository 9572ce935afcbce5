"""Make the starting point of the default run from nothing: a tiny Qwen3-MoE that half knows how to
answer word problems. benchmarks/make_steps_model.py makes the studies' with it.

The model is trained, supervised, on answers of which most are wrong for the strict verifier
(MIXTURE): right but without `####`, with the wrong operation, or with a slipped number. Sampled at
temperature 1 it is right about a quarter of the time, on problems it has seen and on held-out ones,
which leaves RL something to choose from. Nothing is downloaded.

    OUT/config.json, model.safetensors, ...         what Hugging Face and vLLM load
    OUT/data/raw/train.jsonl, test.jsonl            raw GSM8K form; test has the held-out pairs
    OUT/data/train_chat.parquet, test_chat.parquet  the same as `gsm8k.convert` writes it, for runs
    OUT/recipe.json                                 the recipe
"""

import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from mindspeed_qerl.common.files import json_text, new_directory
from mindspeed_qerl.tasks.rows import plain_prompt

from . import word_problems
from .word_problems import Pair

# One digit, one newline, "####", a word with the space before it, any other single character:
# joined they give the text back.
TOKEN_PATTERN = r"\d|####| ?[A-Za-z]+|[^\dA-Za-z]"
UNK = "<unk>"
PAD = "<pad>"
EOS = "<eos>"


def _shape(layers: int, width: int, experts: int, expert_width: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": expert_width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
    }


SHAPES = {
    "tiny": _shape(2, 128, 8, 64, 4),
    "deep": _shape(7, 128, 8, 96, 4),
    "large": _shape(4, 256, 16, 192, 8),
}


@dataclass(frozen=True)
class ModelRecipe:
    """Everything that decides what is made. `version` is raised when the wordings, the model or the
    training code change.
    """

    seed: int = 0
    shape: str = "tiny"  # a key of SHAPES
    steps: int = 700  # supervised steps; 0 leaves the weights random
    batch_size: int = 64
    learning_rate: float = 2e-3
    held_out: float = 0.1  # share of the 210 operand pairs that only test.jsonl has
    train_problems: int = 4000
    test_problems: int = 500
    version: int = 1


def build_tokenizer(world: ModuleType = word_problems):
    """A word-level tokenizer of transformers over the words of the word problems, digits and
    punctuation: `decode(encode(text)) == text` for every generated text; any other word becomes
    `<unk>`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = set()
    for text in word_problems.all_wordings(world.TEMPLATES):
        tokens.update(re.findall(TOKEN_PATTERN, text))
    vocabulary = {token: index for index, token in enumerate([UNK, PAD, EOS, *sorted(tokens)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # join without spaces: each word carries its own
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def build_model(tokenizer, shape: str):
    """A Qwen3-MoE of `SHAPES[shape]` with random fp32 weights (from torch's global generator), tied
    embeddings.
    """
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SHAPES[shape],
        vocab_size=len(tokenizer),
        intermediate_size=4 * SHAPES[shape]["hidden_size"],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        initializer_range=0.06,  # Qwen's 0.02 is meant for far wider models
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.set_experts_implementation("grouped_mm")  # the fastest path on a CPU by far
    return model


def train_supervised(
    model,
    tokenizer,
    training_pairs: list[Pair],
    recipe: ModelRecipe,
    world: ModuleType = word_problems,
) -> list[float]:
    """Train `model` in place on mixed answers to problems of `world` over `training_pairs`; the loss
    of every step, nats per token of the answer and its eos.
    """
    from .supervised import fit, padded

    rng = random.Random(f"supervised {recipe.seed}")
    allowed = set(training_pairs)

    def batches():
        while True:
            problems = [world.random_problem(training_pairs, rng) for _ in range(recipe.batch_size)]
            answers = [
                world.mixed_answer(problem, allowed, world.MIXTURE, rng) for problem in problems
            ]
            prompts = [plain_prompt(problem.question) for problem in problems]
            yield padded(
                tokenizer(prompts)["input_ids"],
                tokenizer([answer + EOS for answer in answers])["input_ids"],
                tokenizer.pad_token_id,
            )

    return fit(model, batches(), recipe.steps, recipe.learning_rate)


def make_tiny_model(
    output_dir: str | Path, recipe: ModelRecipe, world: ModuleType = word_problems
) -> dict:
    """Make model, tokenizer and data under `output_dir` and return the content of its recipe.json.
    world: whose problems it is taught.

    Anything in the way is left alone and raises FileExistsError. Work happens in a hidden sibling
    that is renamed at the end, so that `output_dir` is never half made.
    """
    import torch

    from mindspeed_qerl.tasks.gsm8k.convert import convert

    with new_directory(Path(output_dir)) as directory:
        threads = torch.get_num_threads()
        # nearly as fast as two for so small a model, and four times as fast when another process
        # wants a core
        torch.set_num_threads(1)
        training_pairs, held_out_pairs = word_problems.split_pairs(recipe.held_out, recipe.seed)
        raw = directory / "data" / "raw"
        raw.mkdir(parents=True)
        for name, pairs, count in (
            ("train", training_pairs, recipe.train_problems),
            ("test", held_out_pairs, recipe.test_problems),
        ):
            seed = f"{name} {recipe.seed}"
            problems = word_problems.make_problems(pairs, count, seed, world.random_problem)
            word_problems.write_problems(raw / f"{name}.jsonl", problems)
        convert(raw, directory / "data")

        tokenizer = build_tokenizer(world)
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            model = build_model(tokenizer, recipe.shape)
            train_supervised(model, tokenizer, training_pairs, recipe, world)
        torch.set_num_threads(threads)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

        report = {"recipe": asdict(recipe), "parameters": model.num_parameters()}
        (directory / "recipe.json").write_text(json_text(report), encoding="utf-8")
        return report
