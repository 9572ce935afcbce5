"""Five steps of ms-swift's GRPO with vLLM in its process, on a CPU, with AQN by its plugin:

python swift_run.py MODEL FOLDER [more arguments of `swift rlhf`]
"""

import json
import sys
from pathlib import Path

from swift.pipelines import rlhf_main

from mindspeed_qerl.integrations.cpu import keep_weights

PLUGIN = Path(__file__).parents[2] / "examples/grpo/ms_swift_plugin.py"
REWARD = """
from swift.rewards import ORM, orms

class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(completion) % 3) for completion in completions]

orms["length"] = Length
"""
SETTINGS = """
--rlhf_type grpo --model_type qwen3 --template dummy --use_vllm true --vllm_mode colocate
--vllm_max_model_len 128 --vllm_enforce_eager true --tuner_type lora --lora_rank 8
--reward_funcs length --num_generations 4 --per_device_train_batch_size 4
--max_completion_length 16 --max_steps 5 --learning_rate 0.01 --use_cpu true --torch_dtype float32
--bf16 false --report_to none --save_strategy no --logging_steps 1 --split_dataset_ratio 0
"""


def main(model: str, folder: str, *more: str) -> None:
    keep_weights()
    data, reward = Path(f"{folder}.jsonl"), Path(f"{folder}_reward.py")
    rows = [{"messages": [{"role": "user", "content": f"tom has {i} apples"}]} for i in range(32)]
    data.write_text("\n".join(map(json.dumps, rows)))
    reward.write_text(REWARD)
    words = f"--model {model} --dataset {data} --output_dir {folder} {SETTINGS}"
    words += f"--external_plugins {PLUGIN} {reward} --target_modules q_proj o_proj"
    rlhf_main([*words.split(), *more])


if __name__ == "__main__":
    main(*sys.argv[1:])
