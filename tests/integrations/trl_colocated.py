"""Five steps of TRL's GRPOTrainer with vLLM in its process, on a CPU:

    python trl_colocated.py MODEL FOLDER noise|answer|target|off|without|nearest|unbiased

`noise`: AQN, and an evaluation in the middle; `answer`: a draw for each answer; `target`: its sigma
follows a target; `off`: the proof of arrival alone; `without`: TRL as it is; `nearest`, `unbiased`:
`off` with vLLM in bfloat16, so rounded, lr 5e-6. What was sampled and trained is left in
FOLDER/trained.json.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.aqn.targets import select_targets
from mindspeed_qerl.integrations.cpu import keep_weights
from mindspeed_qerl.integrations.trl import add_noise
from tests.integrations.programs import FLOAT32, check_log_probs, norms_of
from tests.upstream.reference import drawn, scored_by_draws

LOGGED = """
loss reward grad_norm completions/mean_length sampling/importance_sampling_ratio/mean
"""
SETTINGS = json.loads("""{
    "noise": {"noise": {"num_stages": 3}},
    "answer": {"noise": {"num_stages": 3}, "draws": "answer"},
    "target": {"noise": {
        "schedule": "target", "num_stages": 3, "target_start": 1e-3, "target_end": 1e-3
    }},
    "off": {"noise": null},
    "nearest": {"noise": null, "elements": 0, "stop": false},
    "unbiased": {"noise": null, "elements": 0, "stop": false, "rounding": "unbiased"}
}""")  # of AQN, by mode
CONFIG = json.loads("""{
    "use_vllm": true, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 128, "per_device_train_batch_size": 8, "num_generations": 4,
    "max_completion_length": 16, "logging_steps": 1, "report_to": [], "use_cpu": true,
    "bf16": false, "save_strategy": "no"
}""")  # of TRL
QUESTIONS = [{"prompt": f"tom has {i % 9 + 1} apples"} for i in range(64)]


def reward(completions, **kwargs):
    return [float(len(completion) % 3) for completion in completions]


def trainer_of(model: str, folder: Path, peft_config=None, dtype="float32", **words) -> GRPOTrainer:
    """A trainer with vLLM in its process; dtype: vLLM's. words: of its config."""
    keep_weights()
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype)  # TRL leaves it bfloat16
    config = GRPOConfig(output_dir=str(folder), **CONFIG, **words)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(QUESTIONS),
        eval_dataset=Dataset.from_list(QUESTIONS[:8]),
        peft_config=peft_config,
    )


def main(model: str, folder: Path, mode: str) -> None:
    dtype = "bfloat16" if mode in ("nearest", "unbiased") else "float32"
    if mode == "answer":
        vllm_generation.LLM = partial(
            vllm_generation.LLM, enforce_eager=True, enable_prefix_caching=False
        )
    trainer = trainer_of(
        model,
        folder,
        LoraConfig(r=8, target_modules=["q_proj", "o_proj"]),
        dtype,
        max_steps=5,
        learning_rate=1e-2 if dtype == "float32" else 5e-6,
        eval_strategy="steps" if mode == "noise" else "no",
        eval_steps=4,
    )
    if mode in SETTINGS:
        add_noise(trainer, report=f"{folder}/noise", **SETTINGS[mode])
    llm, before = trainer.vllm_generation.llm, norms_of(trainer.model)
    served = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    clean, noisy_steps, evaluations = norms_of(served), set(), 0
    generate = llm.generate

    def observed(*args, **kwargs):
        nonlocal evaluations
        outputs = generate(*args, **kwargs)
        changed = any(not torch.equal(clean[name], w) for name, w in norms_of(served).items())
        if trainer.model.training:
            if changed and mode == "answer":
                check_draws(outputs, twin_of(served, model), trainer.state.global_step)
            if changed:
                noisy_steps.add(trainer.state.global_step)
        else:
            evaluations += 1
            assert not changed, "noise in an evaluation"
        return outputs

    llm.generate = observed
    trainer.train()
    llm.generate = generate
    for name, weight in norms_of(trainer.model).items():
        assert torch.equal(weight, before[name]), name
    trainer.save_model(folder / "saved")
    with safe_open(folder / "saved" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118
    if mode == "noise":
        assert noisy_steps == {2, 3, 4} and evaluations
        check_noisy_answers(trainer, served, model)
        logged = [row for row in trainer.state.log_history if "loss" in row]
        assert [row["aqn/sigma"] for row in logged[:3]] == [0, 0, 0.05]
        assert logged[-1]["sync/count"] >= 5 and logged[-1]["sync/failures"] == 0
    if mode == "answer":
        assert noisy_steps == {2, 3, 4}
    history = [
        {name: row[name] for name in LOGGED.split()}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    adapters = {name: w for name, w in trainer.model.named_parameters() if "lora_" in name}
    sums = {name: w.double().sum().item() for name, w in adapters.items()}
    (folder / "trained.json").write_text(json.dumps({"history": history, "adapters": sums}))


def twin_of(served, model: str):
    """transformers' model with vLLM's merged weights, without noise."""
    merged = dict(served.named_parameters())
    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, weight in twin.named_parameters():
        if "o_proj" in name:
            weight.data.copy_(merged[name])
        elif "q_proj" in name:
            whole = merged[name.replace("q_proj", "qkv_proj")]
            weight.data.copy_(whole[: len(weight)])
    return twin


def check_noisy_answers(trainer: GRPOTrainer, served, model: str) -> None:
    """vLLM has the weights of the last sync, and noise again after the last evaluation."""
    llm = trainer.vllm_generation.llm
    llm.generate({"prompt_token_ids": [5]}, use_tqdm=False)
    twin = twin_of(served, model)
    check_log_probs(llm, twin, norms_of(served), [5, 6, 7, 8])


def check_draws(outputs: list, twin, step: int) -> None:
    """Each answer's log-probs are those of `twin` with the answer's own draw, in their order."""
    clean = {name: norm.weight.detach().clone() for name, norm in select_targets(twin).items()}
    level = NoiseLevel(step, stage=1, sigma=0.05 if step < 4 else 0.0005)
    answers = [drawn(output.outputs[0]) for output in outputs]
    asked = [(output.prompt_token_ids, ids) for output, (ids, _) in zip(outputs, answers)]
    draws = [*range(1, 9)]
    by_draws = [
        scored_by_draws(twin, clean, 1, level, asked, numbers)
        for numbers in (draws, draws[1:] + draws[:1])
    ]
    for (_, served), *both in zip(answers, *by_draws):
        apart, other = ((each - torch.tensor(served)).abs().max().item() for each in both)
        assert apart < FLOAT32 and (other > 10 * FLOAT32 or level.sigma < 0.05), (apart, other)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
