"""Train a Hugging Face model, supervised, on the solutions of a GSM8K split, before it is trained
with GRPO.

    python tools/warm_up.py --model models/smollm2_135m_instruct \\
        --data data/gsm8k_two_steps/train_chat.parquet \\
        --output models/smollm2_135m_gsm8k --examples 1920

A model that is never right learns nothing from rewards: this takes it to where some of its answers
are. All weights are trained, on the published solutions without their calculator's marks
(<<48/2=24>>), each example once, in an order that --seed draws, behind the prompt that training
uses: the chat template where the tokenizer has one. The model that was written has to be better at
32 further solutions, which were held out, than the one it began with. What was done is in
OUTPUT/warm_up.json, with the loss of every step.
"""

import argparse
import json
import random
import re
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import new_directory
from mindspeed_qerl.families.fingerprint import weights_digest
from mindspeed_qerl.tasks.prompts import chat_ids, load_tokenizer, plain_ids
from mindspeed_qerl.tasks.rows import read_rows

HELD_OUT = 32  # solutions


def warm_up(arguments: argparse.Namespace) -> tuple[float, float]:
    """Make `arguments.output`, a new directory; the loss of what was held out, before and after."""
    for option in ("examples", "batch_size", "learning_rate"):
        if not getattr(arguments, option) > 0:
            raise ConfigError(
                f"--{option.replace('_', '-')} {getattr(arguments, option)}: it must be above 0"
            )
    rows = read_rows(arguments.data)
    if len(rows) < arguments.examples + HELD_OUT:
        raise ConfigError(
            f"--examples {arguments.examples}, and {HELD_OUT} that it is not trained on: "
            f"{arguments.data} has {len(rows)} rows"
        )
    if lacking := next((row for row in rows if "solution" not in row.columns), None):
        raise ConfigError(
            f"{lacking.where} has no column `solution`: tools/convert_gsm8k.py writes it"
        )
    with new_directory(arguments.output) as making:
        import torch
        from transformers import AutoModelForCausalLM

        from mindspeed_qerl.demo.supervised import fit, padded

        tokenizer = load_tokenizer(arguments.model)
        chosen = random.Random(f"warm-up {arguments.seed}").sample(
            rows, arguments.examples + HELD_OUT
        )
        solutions = [re.sub(r"<<[^>]*>>", "", row.columns["solution"]) for row in chosen]
        ids = chat_ids if tokenizer.chat_template else plain_ids
        eos = tokenizer.eos_token_id
        pairs = [
            (
                ids(tokenizer, row),
                [*tokenizer(solution, add_special_tokens=False)["input_ids"], eos],
            )
            for row, solution in zip(chosen, solutions)
        ]

        def batches(
            of: list[tuple[list[int], list[int]]],
        ) -> list[tuple[torch.Tensor, torch.Tensor]]:
            size = arguments.batch_size
            return [
                padded(*zip(*of[start : start + size]), pad=eos)
                for start in range(0, len(of), size)
            ]

        @torch.no_grad()
        def mean_loss(model) -> float:
            """Nats a token of the held-out solutions."""
            model.eval()
            losses = [model(input_ids=ids, labels=labels).loss.item() for ids, labels in held_out]
            return statistics.fmean(losses)

        training, held_out = (
            batches(pairs[: arguments.examples]),
            batches(pairs[arguments.examples :]),
        )
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        before = mean_loss(model)
        losses = fit(model, training, len(training), arguments.learning_rate, arguments.bfloat16)
        model.save_pretrained(making)
        tokenizer.save_pretrained(making)
        written = AutoModelForCausalLM.from_pretrained(making, dtype=torch.float32)
        after = mean_loss(written)
        if not after < before:  # it may be nan
            raise ConfigError(
                f"the loss of {HELD_OUT} held-out solutions is {before:.3f} nats a token before "
                f"and {after:.3f} after: nothing was learned, and nothing is kept. Try another "
                "--learning-rate, or more --examples"
            )
        done = {
            "model": weights_digest(arguments.model),
            "held_out": [before, after],
            "losses": losses,
        } | {
            name: getattr(arguments, name)
            for name in ("examples", "batch_size", "learning_rate", "bfloat16", "seed")
        }
        (making / "warm_up.json").write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
    return before, after


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="the model to begin with"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="a split that convert_gsm8k.py wrote",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="directory to make"
    )
    parser.add_argument(
        "--examples", type=int, default=2048, help="how many solutions (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="solutions a step (default: %(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="(default: %(default)s)")
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="multiply in bfloat16: for a processor that has it (avx512_bf16, amx); slower on "
        "others",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the examples (default: %(default)s)"
    )
    arguments = parser.parse_args()
    try:
        before, after = warm_up(arguments)
    except (OSError, ConfigError) as error:
        print(f"warm_up: {error}", file=sys.stderr)
        return 1
    print(
        f"{arguments.output}: loss of {HELD_OUT} held-out solutions {before:.3f} -> {after:.3f} "
        "nats a token"
    )
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
