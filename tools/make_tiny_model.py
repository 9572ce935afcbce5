"""Make the starting point of local runs from nothing: model, tokenizer and word problems; a minute
or two. That of the quickstart, models/tiny_qwen3_moe, comes with the repository: made anew, on
another kind of processor, it has other floats.

The directory holds a Hugging Face model (transformers and vLLM load it), data/train_chat.parquet
and data/test_chat.parquet (one-step word problems; the test problems use operand pairs that nothing
in training uses), and recipe.json: what was made. Running it again finds the directory made and
does nothing.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import quietly, use_checkout

    use_checkout()

from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        default="models/tiny_qwen3_moe",
        metavar="DIR",
        help="directory to make; one that holds anything else is never overwritten (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="decides the held-out pairs, the problems and the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="a 10M-parameter Qwen3-MoE with random weights and the same tokenizer and data, for "
        "benchmarks",
    )
    arguments = parser.parse_args()
    recipe = ModelRecipe(seed=arguments.seed)
    if arguments.large:
        recipe = replace(recipe, shape="large", steps=0)
    output = arguments.output
    try:
        report = make_tiny_model(output, recipe)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"error: interrupted; {output} was not made", file=sys.stderr)
        return 130
    print(f"{output}: {report['parameters']:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(quietly(main))
