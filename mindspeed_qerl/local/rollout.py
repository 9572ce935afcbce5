"""vLLM samples the answers: weights pushed in place, noise on for rollouts and off for everything
else.

Around each sync the weights are packed anew for vLLM's kernels (packing.py). What the engine then
really computes with is read back by `movement`.
"""

import contextlib
import gc
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from mindspeed_qerl.algorithm.metrics import mismatch
from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.files import forget_shared_memory
from mindspeed_qerl.families import ModelShape, family_of, read_shape
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.local.hardware_error import HardwareErrorMode, plain_experts
from mindspeed_qerl.local.packing import (
    ExpertPacking,
    PackedLinear,
    keep_linear_weights,
    packed_linears,
)
from mindspeed_qerl.local.quantized import QuantizedModel
from mindspeed_qerl.lora.proof import join, movement
from mindspeed_qerl.recipe.types import Quantization
from mindspeed_qerl.routing.recorder import RouteRecorder
from mindspeed_qerl.routing.routes import Routers


@dataclass(frozen=True)
class Completion:
    """A sampled answer: token ids (with the end token, if reached), their logprobs under the policy
    that sampled, if they were asked for; and where it computed them, if that was recorded.
    """

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool
    # [prompt + answer - 1, layers, top_k]: the experts that its tokens went to; arrays are not
    # compared with ==
    routes: np.ndarray | None = field(default=None, compare=False)


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
        kv_cache_gib: for the KV cache where there is no accelerator.
        share_prompts: what begins alike is computed once, in blocks of 32 tokens, the smallest that
            vLLM's CPU attention takes; by the weights of that moment: `reset_prefix_cache` when
            they change. more: goes to LLM.
    """
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(kv_cache_gib),
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
    )
    from vllm import LLM

    gc.freeze()  # vLLM collects garbage five times while it starts
    # Under enforce_eager vLLM still compiles its sampler: a C++ compiler, seconds at each start,
    # the same numbers.
    torch.compiler.set_stance("force_eager")
    architecture = family_of(read_shape(model_dir)).architecture  # config.json may leave it out
    # "hf": else a consolidated.safetensors beside the weights is taken for Mistral's, and nothing
    # else is read
    return LLM(
        model=model_dir,
        dtype=dtype,
        load_format="hf",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        hf_overrides={"architectures": [architecture]},
        enable_prefix_caching=share_prompts,
        **({"block_size": 32} if share_prompts else {}),
        **more,
    )


def name_shared_memory(name: str) -> None:
    """Let vLLM's CPU engines of one model meet in shared memory of this name. By vLLM's own
    ("env://", cpu_worker.py) two runs would meet. Call before the engine is built.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Shared

    Shared.make_group_name = staticmethod(
        lambda communicator: f"{name}-{communicator.unique_name}-cpushm"
    )


def check_built(model: torch.nn.Module, shape: ModelShape) -> None:
    """ConfigError where vLLM's model computes otherwise than a rank's: its class, rotary positions,
    norms or windows of attention. Of linear layers loading the weights has shown it.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    built = {("architecture", type(model).__name__, family_of(shape).architecture)}
    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            built |= {
                ("rotary positions", type(module).__name__, "RotaryEmbedding"),
                ("rope_theta", module.base, shape.rope_theta),
                ("rotary width", module.rotary_dim, shape.head_dim),
            }
        elif isinstance(module, RMSNorm):
            built.add(("rms_norm_eps", module.variance_epsilon, shape.rms_norm_eps))
        elif isinstance(module, Attention):
            built |= {
                ("sliding_window", module.sliding_window, None),
                ("head_dim", module.head_size, shape.head_dim),
            }
    if faults := [
        f"{what} {theirs} in vLLM, {ours} in training"
        for what, theirs, ours in built
        if theirs != ours
    ]:
        raise ConfigError(f"config.json is not read alike: {'; '.join(sorted(faults))}")


def route_recorder(llm: Any, routers: Routers, max_model_len: int) -> RouteRecorder:
    """A recorder that hears every router of vLLM's model in this process; RuntimeError if one is
    missing.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    recorder, heard = RouteRecorder(worker.model_runner, routers, max_model_len), []
    for name, module in worker.model_runner.model.named_modules():
        if isinstance(router := getattr(module, "router", None), BaseRouter):
            heard.append(int(re.search(r"\blayers\.(\d+)\.", name)[1]))
            router.set_capture_fn(partial(recorder.capture, heard[-1]))
    if tuple(sorted(heard)) != routers.layers:
        raise RuntimeError(
            f"vLLM has routers in the layers {sorted(heard)}, config.json in "
            f"{list(routers.layers)}: algorithm.routing_replay=none goes without their routes"
        )
    return recorder


def complete(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    use_tqdm: bool = False,
    recorder: RouteRecorder | None = None,
    **sampling: Any,
) -> list[list[Completion]]:
    """Per prompt (token ids) its sampled completions, with their routes if there is a recorder.
    sampling: keyword arguments of vLLM's SamplingParams; by default with the logprobs of the
    sampled tokens, logprobs=None: without.
    """
    sampling = {
        "logprobs": 0,
        "flat_logprobs": True,
        **sampling,
    }  # one list of numbers, not a dictionary a token
    with recorder.recording() if recorder else contextlib.nullcontext():
        outputs = _outputs(llm, prompts, use_tqdm, **sampling)
    routes = (
        recorder.take(outputs) if recorder else [[None] * len(output.outputs) for output in outputs]
    )
    return [
        [
            Completion(
                token_ids=list(answer.token_ids),
                logprobs=answer.logprobs.logprobs if answer.logprobs else [],
                truncated=answer.finish_reason == "length",
                routes=of_answer,
            )
            for answer, of_answer in zip(output.outputs, of_output)
        ]
        for output, of_output in zip(outputs, routes)
    ]


def _outputs(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    use_tqdm: bool = False,
    seed: int | None = None,
    **sampling: Any,
) -> list:
    """With a `seed` each answer has one of its own: vLLM counts on from a prompt's for its further
    answers.
    """
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(detokenize=False, **sampling)
    if seed is not None:
        seeds = (seed + i * params.n for i in range(len(prompts)))
        params = [SamplingParams(detokenize=False, seed=one, **sampling) for one in seeds]
    return llm.generate(
        [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts],
        params,
        use_tqdm=use_tqdm,
    )


class RolloutEngine:
    """An in-process vLLM engine whose weights and noise we own.

    Args:
        model_dir: Hugging Face directory the weights are first read from. dtype: "float32" or
            "bfloat16".
        max_model_len: prompt and completion together, tokens. kv_cache_gib: memory for the KV
            cache.
        aqn: for `add_noise`; None: no noise yet.
        routers: those of the model, whose choices `generate` records if it is told to; None: it
            cannot.
        quantization: of the linear layers; None: they are what was synced.
        tp_rank, tp_size: of tensor parallel engines in as many processes, which meet at `port` of
            this machine; every method is called on all of them at once, with the same arguments.
    """

    def __init__(
        self,
        model_dir: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_gib: int,
        aqn: dict | None = None,
        routers: Routers | None = None,
        quantization: Quantization | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        port: int | None = None,
    ):
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        keep_linear_weights()
        self.model_dir, self.tp_rank, self.tp_size = model_dir, tp_rank, tp_size
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # in this process, where its weights can be reached
        )
        if tp_size > 1:  # torchrun's variables
            os.environ.update(
                RANK=str(tp_rank),
                LOCAL_RANK=str(tp_rank),
                WORLD_SIZE=str(tp_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                VLLM_HOST_IP="127.0.0.1",
                GLOO_SOCKET_IFNAME="lo",
            )
            name_shared_memory(f"qerl{port}")
        self.llm = start_vllm(
            model_dir,
            dtype,
            max_model_len,
            max_num_seqs,
            kv_cache_gib,
            share_prompts=routers is None,  # of a prompt that is not computed no routes are known
            logprobs_mode="processed_logprobs",
            seed=0,
            tensor_parallel_size=tp_size,
            **({"distributed_executor_backend": "external_launcher"} if tp_size > 1 else {}),
        )
        if tp_size > 1:
            forget_shared_memory()
        self.model = self.llm.apply_model(lambda model: model)[0]
        check_built(self.model, read_shape(model_dir))
        self.injector: NoiseInjector | None = None
        if aqn:
            self.add_noise(aqn)
        self.recorder = route_recorder(self.llm, routers, max_model_len) if routers else None
        # of routed experts: name, module with `w13_weight` [E, 2f, h] and `w2_weight` [E, h, f],
        # how both are packed
        self._experts = [
            (
                name,
                module,
                *(
                    ExpertPacking(weight, module.quant_method.moe_kernel.fused_experts.isa)
                    for weight in (module.w13_weight, module.w2_weight)
                ),
            )
            for name, module in self.model.named_modules()
            if isinstance(module, RoutedExperts)
        ]
        self.quantized = None
        if quantization:
            names = {
                parameter: [name for name, _ in self._take_apart({parameter: weight})]
                for parameter, weight in self._kernel_weights().items()
            }
            self.quantized = QuantizedModel(self.model, names, Checkpoint(model_dir), quantization)
            self.start_sync()
            self.finish_sync()

    def add_noise(self, aqn: dict[str, Any]) -> None:
        """Make `noise_step` mean something; aqn: keyword arguments of `NoiseInjector` besides the
        model.
        """
        self.injector = NoiseInjector(self.model, **aqn)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        seed: int,
        sampling: dict,
        noise_step: int | None = None,
        hardware_error: dict | None = None,
        record_routes: bool = False,
        quantized: bool = True,
    ) -> tuple[list[list[Completion]], NoiseReport | None]:
        """Per prompt (token ids) `n` completions, and the noise's report (None without noise). The
        same call on the same weights gives the same completions.

        Args:
            seed: of the sampler. sampling: keyword arguments of vLLM's SamplingParams.
            noise_step: the step whose noise is on, only inside this call; None: the synced weights.
            hardware_error: keyword arguments of `HardwareErrorMode` besides the seed; None:
                computed as it is.
            quantized: by the weights that are quantised, if some are; else by those that were
                synced.
        """
        if hardware_error:
            hardware_error = {**hardware_error, "seed": seed}
            sampling = {
                **sampling,
                "skip_reading_prefix_cache": True,
            }  # each answer has errors of its own
        with self._policy(noise_step, hardware_error, quantized) as report:
            torch.manual_seed(seed)
            recorder = self.recorder if record_routes else None
            return complete(self.llm, prompts, recorder=recorder, n=n, **sampling), report

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        noise_step: int | None = None,
        hardware_error: dict | None = None,
        quantized: bool = True,
    ) -> list[list[float]]:
        """log p(token t | tokens before it) for every token but the first of each sequence."""
        with self._policy(noise_step, hardware_error, quantized):
            outputs = _outputs(self.llm, sequences, max_tokens=1, prompt_logprobs=0)
        return [
            [
                entry[token].logprob
                for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
            ]
            for output in outputs
        ]

    def probe(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        noise_step: int | None,
    ) -> dict[str, float]:
        """Metrics: k3 and effective sample size, between the synced policy and what the format
        makes of it, alone and with the noise of a step, and the noise without the format; at
        temperature 1, on tokens that were sampled with both. With noise the sigma that alone would
        have the format's k3, by k3 ~ sigma^2 (docs/quantization.md).
        """
        most = (
            self.llm.llm_engine.model_config.max_model_len - 1
        )  # vLLM wants room for one token more
        sequences = [[*prompt, *answer][:most] for prompt, answer in zip(prompts, answers)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        place = torch.arange(lengths.max().item() - 1)
        starts = torch.tensor([len(prompt) for prompt in prompts]) - 1
        mask = (place >= starts[:, None]) & (place < lengths[:, None] - 1)

        def logprobs(quantized: bool, noise_step: int | None) -> torch.Tensor:
            rows = [
                torch.tensor(row)
                for row in self.logprobs(sequences, noise_step, quantized=quantized)
            ]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        with self._policy(noise_step, None, quantized=True) as noise:
            sigma = noise.measured_std if noise else 0.0
        policies = {"": (True, None)}  # by name of the metric: quantised, noise
        if sigma:
            policies |= {"noise_": (False, noise_step), "together_": (True, noise_step)}
        clean, found = logprobs(False, None), {}
        for name, policy in policies.items():
            metrics = mismatch(logprobs(*policy), clean, mask)
            found |= {
                f"quantization/{name}{which}": metrics[f"mismatch/{which}"].value()
                for which in ("k3", "effective_sample_size")
            }
        if sigma and (of_noise := found["quantization/noise_k3"]) > 0:
            found["quantization/equivalent_sigma"] = sigma * math.sqrt(
                found["quantization/k3"] / of_noise
            )
        return found

    @contextlib.contextmanager
    def _policy(
        self, noise_step: int | None, hardware_error: dict | None, quantized: bool
    ) -> Iterator[NoiseReport | None]:
        """The weights, quantised or not, with the noise of a step, computed as other hardware
        would; where more than weights change the experts' fused kernel gives way to torch's
        operators meanwhile.
        """
        with contextlib.ExitStack() as undo:
            report = None
            if self.injector and self.injector.is_on:
                raise RuntimeError("the noise of an earlier call is still on: it was not taken off")
            if not self.llm.reset_prefix_cache():
                raise RuntimeError(
                    "vLLM still holds keys and values of an earlier call, by other weights"
                )
            if self.injector and noise_step is not None:
                report = self.injector.apply(noise_step)
                undo.callback(self.injector.remove)
            if self.quantized and not quantized:
                self._put(quantized=False)
                undo.callback(self._put, quantized=True)
            plain = hardware_error or self.quantized and self.quantized.rounds_activations
            for name, module, w13_packing, w2_packing in self._experts if plain else ():
                kernel = module.quant_method.moe_kernel.fused_experts
                kernel.apply = partial(
                    plain_experts,
                    self._expert(f"{name}.w13_weight", w13_packing.unpack(module.w13_weight)),
                    self._expert(f"{name}.w2_weight", w2_packing.unpack(module.w2_weight)),
                )
                undo.callback(delattr, kernel, "apply")  # the class's own is there again
            if hardware_error:
                for layer in packed_linears(self.model):
                    layer.cpu_linear, packed = torch.nn.functional.linear, layer.cpu_linear
                    undo.callback(setattr, layer, "cpu_linear", packed)
                undo.enter_context(HardwareErrorMode(**hardware_error))
            yield report

    def _expert(
        self, parameter: str, weights: torch.Tensor
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """One linear layer of an expert, for `plain_experts`; weights: unpacked, of all experts."""
        if self.quantized:
            return lambda expert, x: self.quantized.linear(
                parameter, x, weights[expert], expert=expert
            )
        return lambda expert, x: torch.nn.functional.linear(x, weights[expert])

    @torch.no_grad()
    def start_sync(self) -> None:
        """Until `finish_sync` the expert weights are unpacked, in place, one layer at a time."""
        for _, module, w13_packing, w2_packing in self._experts:
            module.w13_weight.copy_(w13_packing.unpack(module.w13_weight))
            module.w2_weight.copy_(w2_packing.unpack(module.w2_weight))

    @torch.no_grad()
    def load(self, *parts: dict[str, np.ndarray]) -> None:
        """HF-named tensors from several ranks, into the weights in place; those left out stay as
        they are.
        """
        self.load_tensors(
            (name, torch.from_numpy(array)) for part in parts for name, array in part.items()
        )

    @torch.no_grad()
    def load_tensors(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The same of (name, tensor)."""
        self.model.load_weights(self.quantized.receive(named) if self.quantized else named)

    @torch.no_grad()
    def finish_sync(self) -> dict[str, float]:
        """Pack the weights again; returns the relative error that quantisation made of the linear
        weights, of all and by layer (empty: nothing is quantised).
        """
        if self.quantized:
            self.quantized.put(quantized=True)
        self._pack()
        return self.quantized.weights.errors() if self.quantized else {}

    @torch.no_grad()
    def _put(self, quantized: bool) -> None:
        self.start_sync()
        self.quantized.put(quantized)
        self._pack()

    def _pack(self) -> None:
        for layer in packed_linears(self.model):
            layer.cpu_linear.forget()
        for _, module, *_ in self._experts:
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)

    @torch.no_grad()
    def movement(
        self, *factors: dict[str, tuple[str, np.ndarray, np.ndarray]]
    ) -> dict[str, dict[str, float]]:
        """What each LoRA target did to the weights that this engine's kernels read, against (alpha
        / r) B A and the base weights on disk (lora/proof.py); of quantised weights to what was
        quantised, and whether they are that. factors: from each rank (`TrainRank.adapter_factors`).
        """
        held, checkpoint, found = (
            dict(self._take_apart(self._kernel_weights())),
            Checkpoint(self.model_dir),
            [],
        )
        if self.quantized:
            adapters = dict(self._take_apart(self.quantized.adapters))
            for name, *whole in self.quantized.weights:
                synced, used, adapter = (self._part(name, tensor) for tensor in whole)
                held[name] = synced + (held[name] - used) + (adapters.get(name, adapter) - adapter)
        for name, (target, b, a) in sorted(item for part in factors for item in part.items()):
            update = torch.from_numpy(b) @ torch.from_numpy(a)
            found.append(
                {
                    target: movement(
                        held[name],
                        self._part(name, checkpoint.read(name)),
                        self._part(name, update),
                    )
                }
            )
        return join(found)

    def _part(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """What this engine holds of a linear layer's whole weight [out, in]."""
        return weight.chunk(
            self.tp_size, dim=1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        )[self.tp_rank]

    def _kernel_weights(self) -> dict[str, torch.Tensor]:
        """Every linear weight as vLLM computes with it now, unpacked, by vLLM's parameter names."""
        from vllm.model_executor.layers.linear import LinearBase

        linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, LinearBase)
        }
        weights = {
            f"{name}.weight": module.cpu_linear.held(module.weight)
            if isinstance(module.cpu_linear, PackedLinear)
            else module.weight
            for name, module in linears.items()
        }
        for name, module, w13_packing, w2_packing in self._experts:
            weights[f"{name}.w13_weight"] = w13_packing.unpack(module.w13_weight)
            weights[f"{name}.w2_weight"] = w2_packing.unpack(module.w2_weight)
        return weights

    def _take_apart(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) of what is fused or stacked in tensors that have vLLM's
        parameter names.
        """
        for name, tensor in tensors.items():
            module_name, _, which = name.rpartition(".")
            parent, _, leaf = module_name.rpartition(".")
            if which == "weight":
                fused = self.model.packed_modules_mapping.get(leaf, [leaf])
                sizes = getattr(
                    self.model.get_submodule(module_name), "output_partition_sizes", [len(tensor)]
                )
                yield from zip((f"{parent}.{part}.weight" for part in fused), tensor.split(sizes))
            else:  # of experts: w13 has the gate above the up projection
                parts = ("gate", "up") if which == "w13_weight" else ("down",)
                for expert, of_expert in enumerate(tensor):
                    for part, weight in zip(parts, of_expert.chunk(len(parts))):
                        yield f"{parent}.{expert}.{part}_proj.weight", weight
