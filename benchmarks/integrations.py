"""What AQN and the proof of arrival take of a step of TRL's GRPOTrainer, vLLM in its process.

    python benchmarks/integrations.py    # 10M parameters, 8 x 8 answers of 256 tokens, minutes

A clock runs around what integrations/vllm.py adds, in the run itself: the share of its steps, which
other programs disturb less than a comparison of two runs. The first step is not counted.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

NOISE, PROOF, STEP = "noise", "proof of arrival", "step"


class Clock:
    """Seconds by what is timed, of each call."""

    def __init__(self):
        self.seconds = defaultdict(list)

    def around(self, owner, name, what):
        method = getattr(owner, name)

        def call(*args, **kwargs):
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[what].append(time.perf_counter() - started)

        setattr(owner, name, call)


def reward(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]


def train(model: Path, folder: Path, steps: int, tokens: int) -> Clock:
    """Train with noise and proof on."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from mindspeed_qerl.integrations.cpu import keep_weights
    from mindspeed_qerl.integrations.trl import add_noise

    keep_weights()
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")
    config = GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        vllm_max_model_length=64 + tokens,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=tokens,
        generation_kwargs={"ignore_eos": True},
        max_steps=steps + 1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    questions = [{"prompt": f"tom has {number} apples"} for number in range(8 * (steps + 1))]
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(questions),
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "o_proj"]),
    )
    rollout = add_noise(trainer, report=str(folder / "noise"), noise={"num_stages": 2})
    clock = Clock()
    clock.around(rollout, "_put_on", NOISE)
    clock.around(rollout, "_take_off", NOISE)
    clock.around(rollout.arrival, "expect", PROOF)
    clock.around(rollout, "_prove", PROOF)
    clock.around(trainer, "training_step", STEP)
    train_one = trainer.training_step
    micro_steps = 0

    def after_the_first_step(*args, **kwargs):
        nonlocal micro_steps
        if micro_steps == config.gradient_accumulation_steps:
            clock.seconds.clear()
        micro_steps += 1
        return train_one(*args, **kwargs)

    trainer.training_step = after_the_first_step
    trainer.train()
    return clock


def main() -> None:
    from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="integrations_") as folder:
        model = Path(folder) / "model"
        parameters = make_tiny_model(model, ModelRecipe(shape="large", steps=0))["parameters"]
        clock = train(model, Path(folder) / "trl", arguments.steps, arguments.tokens)
    whole = sum(clock.seconds[STEP])
    print(f"{parameters:,} parameters, {whole / arguments.steps:.1f} s a step")
    for what in (NOISE, PROOF):
        seconds = sum(clock.seconds[what])
        print(f"{what}: {seconds / arguments.steps:.4f} s a step, {seconds / whole:.2%}")


if __name__ == "__main__":
    main()
