"""Noise and proof of arrival without any trainer: an engine, three syncs by hand, the report.

    python examples/proof_without_a_trainer.py    # on a CPU, in a checkout

The third sync has a planted fault: vLLM's loader leaves out one matrix of one expert, and says
nothing. On GPUs and NPUs leave out `keep_weights`.
"""

import json
import os
import tempfile
from operator import methodcaller
from pathlib import Path

REPORT = tempfile.mkdtemp()
SETTINGS = {
    "report": REPORT,
    "noise": {"sigma_start": 0.05, "num_stages": 2, "total_steps": 3},
    "elements": 0,  # compare all; 64 of each tensor by default
    "stop": False,  # report a failure, and go on
}
os.environ["MINDSPEED_QERL_ROLLOUT"] = json.dumps(SETTINGS)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process, where the fault is

from safetensors.torch import load_file
from vllm import LLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from mindspeed_qerl.integrations.cpu import keep_weights
from mindspeed_qerl.integrations.report import faults, read_lines, table

MODEL = "models/tiny_qwen3_moe"
left_out = set()
load_weights = Qwen3MoeForCausalLM.load_weights


def forgetful(model, weights):
    return load_weights(model, (pair for pair in weights if pair[0] not in left_out))


def main() -> None:
    keep_weights()
    Qwen3MoeForCausalLM.load_weights = forgetful
    extension = "mindspeed_qerl.integrations.vllm.NoiseExtension"
    llm = LLM(MODEL, max_model_len=64, enforce_eager=True, worker_extension_cls=extension)
    weights = load_file(f"{MODEL}/model.safetensors")
    for step in range(3):
        if step == 2:
            left_out.add("model.layers.1.mlp.experts.3.up_proj.weight")
        sent = {name: weight * (1 + 0.01 * step) for name, weight in weights.items()}
        llm.apply_model(methodcaller("load_weights", sent.items()))
        llm.reset_prefix_cache()
        llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    rows = read_lines(Path(REPORT))
    print("\n".join([*table(rows), *faults(rows)]))


if __name__ == "__main__":
    main()
