"""Make the model of the studies, models/steps_qwen3_moe: a 2.4M-parameter Qwen3-MoE of 7 layers that
half knows how to answer word problems of one to three steps (step_problems.py); minutes.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import step_problems  # beside this file

from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model

RECIPE = ModelRecipe(
    shape="deep", steps=900, held_out=0.15, train_problems=8000, test_problems=1000
)

OUTPUT = Path(__file__).resolve().parents[1] / "models" / "steps_qwen3_moe"

if __name__ == "__main__":
    try:
        report = make_tiny_model(OUTPUT, RECIPE, step_problems)
    except FileExistsError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{OUTPUT}: {report['parameters']:,} parameters")
