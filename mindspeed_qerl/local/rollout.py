"""vLLM samples the answers: weights synced in place, packed anew for its kernels (packing.py) and
read back for the proof that a sync arrived; noise on for rollouts and off for everything else.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.lora.held import kernel_tensors, take_apart
from mindspeed_qerl.lora.proof import Movement, join, movement
from mindspeed_qerl.lora.rounding import dither_of
from mindspeed_qerl.recipe.types import Quantization

from . import serving
from .batch import Answer
from .hardware_error import HardwareErrorMode
from .packing import PackedExperts, keep_linear_weights, packed_linears, plain_experts
from .quantized import QuantizedLayers
from .sharded import AdapterFactors


@dataclass(frozen=True)
class RolloutRequest:
    """Describes one call of the rollout engine.

    Attributes:
        prompts: token ids. n: answers to each. seed: of the sampler. sampling: keyword arguments
            of vLLM's SamplingParams.
        noise: what is on, only inside this call; None: the synced weights. draws: of it that of
            each answer, if not all have one.
        hardware_error: keyword arguments of `HardwareErrorMode` besides the seed; None: computed as
            it is.
        trained: whether answers come with their log-probs, and their routes, if they are recorded.
        quantized: by the weights that are quantized, if some are; else by those that were synced.
    """

    prompts: Sequence[Sequence[int]]
    n: int
    seed: int
    sampling: dict
    noise: NoiseLevel | None = None
    draws: Sequence[int] = ()
    hardware_error: dict | None = None
    trained: bool = True
    quantized: bool = True


class RolloutEngine:
    """An in-process vLLM engine whose weights and noise we own.

    Args:
        model_dir: Hugging Face directory the weights are first read from.
        dtype: "float32" or "bfloat16".
        max_model_len: prompt and completion together, tokens.
        kv_cache_gib: memory for the KV cache.
        records_routes: `generate` can record the choices of the model's routers.
        quantization: of the linear layers; None: they are what was synced.
        noise: keyword arguments of `NoiseInjector` besides the model; None: never any.
    """

    def __init__(
        self,
        model_dir: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_gib: int,
        records_routes: bool = False,
        quantization: Quantization | None = None,
        noise: dict | None = None,
    ):
        keep_linear_weights()
        # in this process, where its weights can be reached
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self.llm = serving.start_vllm(
            model_dir,
            dtype,
            max_model_len,
            max_num_seqs,
            kv_cache_gib,
            share_prompts=not records_routes,  # a prompt that is not computed has no routes
            logprobs_mode="processed_logprobs",
        )
        # vLLM reads the environment when it is imported
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        [model] = self.llm.apply_model(lambda model: model)
        shape = read_shape(model_dir)
        serving.check_built(model, shape)
        self.recorder = None
        if records_routes:
            self.recorder = serving.route_recorder(self.llm, shape.routers, max_model_len)
        self.model = model
        self.checkpoint = Checkpoint(model_dir)
        self.experts = [
            PackedExperts(name, module)
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
        ]
        runner = serving.model_runner(self.llm)
        self.injector = NoiseInjector(model, runner=runner, **noise) if noise else None
        self.quantized: QuantizedLayers | None = None
        if quantization:
            self.quantized = QuantizedLayers(model, self.checkpoint, quantization)
            self._put(quantized=True)

    def noisy_norms(self) -> list[str]:
        """Returns the module names of the norms that get noise, if there is some."""
        return self.injector.names if self.injector else []

    def generate(self, request: RolloutRequest) -> tuple[list[Answer], NoiseReport | None]:
        """The answers to a request, those to one prompt side by side, and the noise's report (None
        without noise). The same request on the same weights gives the same answers.
        """
        sampling = request.sampling
        if request.hardware_error:  # each answer has errors of its own
            sampling = sampling | {"skip_reading_prefix_cache": True}
        with self.policy(request) as report:
            torch.manual_seed(request.seed)
            answers = serving.complete(
                self.llm,
                request.prompts,
                recorder=self.recorder if request.trained else None,
                logprobs=request.trained,
                draws=request.draws,
                n=request.n,
                **sampling,
            )
        return answers, report

    @contextlib.contextmanager
    def policy(self, request: RolloutRequest) -> Iterator[NoiseReport | None]:
        """Inside, vLLM's model has the weights of a request, quantized or not, with its noise, and
        computes as other hardware would; where more than weights change the experts' fused kernel
        gives way to torch's operators meanwhile.
        """
        if self.injector and self.injector.is_on:
            raise RuntimeError("the noise of an earlier call is still on: it was not taken off")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM still holds keys and values of an earlier call, by other weights"
            )
        with contextlib.ExitStack() as undo:
            report = None
            if self.injector and request.noise:
                report = self.injector.apply(request.noise)
                undo.callback(self.injector.remove)
            if self.quantized and not request.quantized:
                self._put(quantized=False)
                undo.callback(self._put, quantized=True)
            rounds = self.quantized and self.quantized.is_on and self.quantized.activation
            if request.hardware_error or rounds:
                multiply = self.quantized.linear if self.quantized else linear
                for experts in self.experts:
                    experts.kernel.apply = partial(plain_experts, multiply, experts.unpacked())
                    # the class's own is there again
                    undo.callback(delattr, experts.kernel, "apply")
            if request.hardware_error:
                for layer in packed_linears(self.model):
                    undo.callback(setattr, layer, "cpu_linear", layer.cpu_linear)
                    layer.cpu_linear = linear
                mode = HardwareErrorMode(**request.hardware_error, seed=request.seed)
                undo.enter_context(mode)
            yield report

    @torch.no_grad()
    def start_sync(self) -> None:
        """Until `finish_sync` the expert weights are unpacked, in place, one layer at a time."""
        for experts in self.experts:
            experts.unpack()

    @torch.no_grad()
    def load(self, *parts: dict[str, np.ndarray]) -> None:
        """HF-named tensors from several ranks, into the weights in place; those left out stay as
        they are.
        """
        for part in parts:
            named = ((name, torch.from_numpy(array)) for name, array in part.items())
            self.model.load_weights(self.quantized.receive(named) if self.quantized else named)

    @torch.no_grad()
    def finish_sync(self, quantized: bool = True) -> dict[str, float]:
        """Pack the weights again, the quantized ones, if some are, or those that were synced;
        returns the relative error that quantization made of the linear weights, of all and by layer
        (empty: nothing is quantized).
        """
        if self.quantized:
            self.quantized.put(quantized)
        for layer in packed_linears(self.model):
            layer.cpu_linear.forget()
        for experts in self.experts:
            experts.pack()
        return self.quantized.weights.errors() if self.quantized else {}

    def _put(self, quantized: bool) -> None:
        """Compute with the quantized weights, or with those that were synced."""
        self.start_sync()
        self.finish_sync(quantized)

    @torch.no_grad()
    def movement(self, *factors: AdapterFactors) -> Movement:
        """Returns what each LoRA target did to the weights that this engine's kernels read, against
        (alpha / r) B A and the base weights on disk (lora/proof.py); of quantized weights to what
        was quantized, and whether they are that. factors: from each rank (`adapter_factors`).
        """
        tensors = dict(kernel_tensors(self.model))
        if self.quantized:
            tensors |= self.quantized.rounded()
        for experts in self.experts:
            tensors |= experts.unpacked()
        held = {each.name: each.part for each in take_apart(self.model, tensors.items())}
        multiplied = {}
        if self.quantized:
            weights = self.quantized.weights
            for name, synced in weights.synced.items():
                multiplied[name] = held[name]
                held[name] = synced + (held[name] - weights.used[name])
        moved = []
        for part in factors:
            for name, (target, b, a) in part.items():
                weight = held[name]
                update = torch.from_numpy(b) @ torch.from_numpy(a)
                base = self.checkpoint.read(name).to(weight.dtype)
                pair = None
                if self.quantized:
                    pair = multiplied[name], self.quantized.weights.rounded(base)
                dither = dither_of(name, weight.shape)
                moved.append({target: movement(weight, base, update, dither, pair)})
        return join(moved)
