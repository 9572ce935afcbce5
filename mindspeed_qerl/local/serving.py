"""vLLM over token ids, in this process."""

import gc
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import astuple
from functools import partial
from itertools import repeat
from typing import Any

import torch

from mindspeed_qerl.aqn.rows import requests_of_answers
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import ModelShape, family_of, read_shape
from mindspeed_qerl.routing.recorder import RouteRecorder
from mindspeed_qerl.routing.routes import Routers

from . import arithmetic
from .batch import Answer

BLOCK = 128  # tokens: the largest of vLLM's on a CPU
# what vLLM calls the numbers of Llama3Rope
SCALING = "scaling_factor low_freq_factor high_freq_factor orig_max_position".split()


def start_vllm(
    model_dir: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_gib: int,
    share_prompts: bool = False,
    **more: Any,
) -> Any:
    """vLLM's LLM over token ids.

    Args:
        kv_cache_gib: at most, for the KV cache where there is no accelerator; no more than
            max_num_seqs of max_model_len fill, since vLLM writes all of it when it starts.
        share_prompts: common prefixes are computed once, in blocks of 32 tokens, the smallest that
            vLLM's CPU attention takes; by the weights of that moment: `reset_prefix_cache` when
            they change.
        more: goes to LLM.
    """
    arithmetic.settle()
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM

    shape = read_shape(model_dir)
    if not torch.accelerator.is_available():
        tokens = (max_num_seqs + 1) * (max_model_len + BLOCK)
        filled = tokens * shape.kv_numbers * getattr(torch, dtype).itemsize
        more["kv_cache_memory_bytes"] = min(kv_cache_gib * 2**30, filled)
    gc.freeze()  # vLLM collects garbage five times while it starts
    # Under enforce_eager vLLM still compiles its sampler: a C++ compiler, seconds at each start,
    # the same numbers.
    torch.compiler.set_stance("force_eager")
    if share_prompts:
        more["block_size"] = 32
    return LLM(
        model=model_dir,
        dtype=dtype,
        # by "auto" vLLM may read a consolidated.safetensors beside the weights instead, as Mistral's
        load_format="safetensors",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enforce_eager=True,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        # which config.json may leave out
        hf_overrides={"architectures": [family_of(shape).architecture]},
        enable_prefix_caching=share_prompts,
        **more,
    )


def check_built(model: torch.nn.Module, shape: ModelShape) -> None:
    """ConfigError where vLLM's model computes otherwise than a rank's: its class, rotary positions,
    norms or windows of attention. Of linear layers loading the weights has shown it.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    built: list[tuple[str, Any, Any]] = [
        ("architecture", type(model).__name__, family_of(shape).architecture)
    ]
    rotary = "RotaryEmbedding", (None,) * 4
    if shape.rope_scaling:
        rotary = "Llama3RotaryEmbedding", astuple(shape.rope_scaling)
    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            numbers = tuple(getattr(module, name, None) for name in SCALING)
            built += [
                ("rotary positions", (type(module).__name__, numbers), rotary),
                ("rope_theta", module.base, shape.rope_theta),
                ("rotary width", module.rotary_dim, shape.head_dim),
            ]
        elif isinstance(module, RMSNorm):
            built.append(("rms_norm_eps", module.variance_epsilon, shape.rms_norm_eps))
        elif isinstance(module, Attention):
            built += [
                ("sliding_window", module.sliding_window, None),
                ("head_dim", module.head_size, shape.head_dim),
            ]
    faults = {
        f"{name} {theirs} in vLLM, {ours} in training"
        for name, theirs, ours in built
        if theirs != ours
    }
    if faults:
        raise ConfigError(f"config.json is not read alike: {'; '.join(sorted(faults))}")


def model_runner(llm: Any) -> Any:
    """Returns vLLM's model runner, which is in this process."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def route_recorder(llm: Any, routers: Routers, max_model_len: int) -> RouteRecorder:
    """A recorder that hooks every router of vLLM's model in this process; RuntimeError if one is
    missing.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.models.utils import extract_layer_index

    runner = model_runner(llm)
    recorder = RouteRecorder(runner, routers, max_model_len)
    layers = []
    for name, module in runner.model.named_modules():
        router = getattr(module, "router", None)
        if isinstance(router, BaseRouter):
            layer = extract_layer_index(name)
            router.set_capture_fn(partial(recorder.capture, layer))
            layers.append(layer)
    if tuple(sorted(layers)) != routers.layers:
        raise RuntimeError(
            f"vLLM has routers in the layers {sorted(layers)}, config.json in "
            f"{list(routers.layers)}: algorithm.routing_replay=none goes without their routes"
        )
    return recorder


def complete(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    use_tqdm: bool = False,
    recorder: RouteRecorder | None = None,
    logprobs: bool = True,
    seed: int | None = None,
    draws: Sequence[int] = (),
    **sampling: Any,
) -> list[Answer]:
    """The answers to prompts (token ids), those to one side by side, with the logprobs of the
    sampled tokens, or without, and their routes if there is a recorder. With a `seed` each
    answer has one of its own: vLLM counts on from a prompt's for its further answers. draws: each
    answer's, of AQN's noise. sampling: more keyword arguments of vLLM's SamplingParams.
    """
    from vllm import SamplingParams, TokensPrompt

    if logprobs:  # one list of numbers, not a dictionary a token; vLLM 0.11 has none
        sampling |= {"logprobs": 0, "flat_logprobs": True}
    params = [SamplingParams(detokenize=False, **sampling) for _ in prompts]
    if seed is not None:
        for number, of_prompt in enumerate(params):
            of_prompt.seed = seed + number * of_prompt.n
    tokens = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    if draws:
        prompts = [prompt for prompt, of_prompt in zip(prompts, params) for _ in range(of_prompt.n)]
        tokens, params = requests_of_answers(tokens, params, draws)
    with recorder.recording() if recorder else nullcontext():
        outputs = llm.generate(tokens, params, use_tqdm=use_tqdm)
    routes = recorder.take(outputs) if recorder else repeat(repeat(None))
    answers = []
    for prompt, output, taken in zip(prompts, outputs, routes):
        for sampled, route in zip(output.outputs, taken):
            answers.append(
                Answer(
                    prompt,
                    token_ids=list(sampled.token_ids),
                    logprobs=sampled.logprobs.logprobs if sampled.logprobs else [],
                    is_truncated=sampled.finish_reason == "length",
                    routes=route,
                )
            )
    return answers
