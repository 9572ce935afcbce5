"""What each kind of hardware error does to the logprobs of the quickstart's model, in float32 and
bfloat16: the table of docs/quantization.md.

    python benchmarks/hardware_error.py            about a minute on 2 cores

Answers are sampled as they are, then the same answers are scored again with each kind on;
|difference| of the logprobs of their tokens.
"""

import argparse
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CASES = (
    ("gaussian, std 0.05", dict(kinds=["gaussian"])),
    ("gaussian, std 0.01", dict(kinds=["gaussian"], gaussian_std=0.01)),
    ("bf16_blocks of 64", dict(kinds=["bf16_blocks"])),
    ("bf16_blocks of 16", dict(kinds=["bf16_blocks"], block=16)),
)


def measure(model: Path, dtype: str) -> None:
    from transformers import AutoTokenizer
    from vllm import SamplingParams, TokensPrompt

    from mindspeed_qerl.local.rollout import RolloutEngine, RolloutRequest
    from mindspeed_qerl.tasks.prompts import Prompts

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts(str(model / "data/test_chat.parquet"), tokenizer, "plain", 96, 200).prompts
    engine = RolloutEngine(str(model), dtype, 128, 256, 1)
    sampling = dict(max_tokens=24, temperature=1.0, stop_token_ids=[tokenizer.eos_token_id])
    answers, _ = engine.generate(RolloutRequest(prompts, 1, 0, sampling))
    sequences = [
        TokensPrompt(prompt_token_ids=[*answer.prompt, *answer.token_ids]) for answer in answers
    ]
    params = SamplingParams(detokenize=False, max_tokens=1, prompt_logprobs=0)

    def scored(hardware_error: dict | None) -> np.ndarray:
        request = RolloutRequest(prompts, 1, 0, sampling, hardware_error=hardware_error)
        with engine.policy(request):
            outputs = engine.llm.generate(sequences, params, use_tqdm=False)
        logprobs = []
        for prompt, output in zip(prompts, outputs):
            of_tokens = zip(output.prompt_token_ids, output.prompt_logprobs)
            logprobs += [entry[token].logprob for token, entry in list(of_tokens)[len(prompt) :]]
        return np.array(logprobs)

    clean = scored(None)
    for name, arguments in CASES:
        difference = np.abs(scored(arguments) - clean)
        print(
            f"| {dtype} | {name} | {difference.mean():.2g} | {np.quantile(difference, 0.99):.2g} | "
            f"{difference.max():.2g} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny_qwen3_moe")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="default: both, each in a process of its own",
    )
    arguments = parser.parse_args()
    if arguments.dtype:
        measure(arguments.model, arguments.dtype)
        return
    print("| dtype | kind | mean | 99 % | largest |\n|---|---|---|---|---|", flush=True)
    for dtype in ("float32", "bfloat16"):
        done = subprocess.run(
            [sys.executable, __file__, "--model", arguments.model, "--dtype", dtype],
            cwd=ROOT,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
        )
        print(
            "\n".join(line for line in done.stdout.splitlines() if line.startswith("|")), flush=True
        )


if __name__ == "__main__":
    main()
