"""vLLM samples the answers: weights pushed in place, noise on for rollouts and off for everything
else.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.local import serving
from mindspeed_qerl.local.hardware_error import HardwareErrorMode, plain_experts
from mindspeed_qerl.local.packing import keep_linear_weights, packed_linears
from mindspeed_qerl.local.served import ServedWeights
from mindspeed_qerl.local.serving import Completion
from mindspeed_qerl.recipe.types import Quantization
from mindspeed_qerl.routing.routes import Routers


class RolloutEngine(ServedWeights):
    """An in-process vLLM engine whose weights and noise we own.

    Args:
        model_dir: Hugging Face directory the weights are first read from.
        dtype: "float32" or "bfloat16".
        max_model_len: prompt and completion together, tokens.
        kv_cache_gib: memory for the KV cache.
        routers: those of the model, whose choices `generate` can record; None: it cannot.
        quantization: of the linear layers; None: they are what was synced.
    """

    def __init__(
        self,
        model_dir: str,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        kv_cache_gib: int,
        routers: Routers | None = None,
        quantization: Quantization | None = None,
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
            share_prompts=routers is None,  # a prompt that is not computed has no routes
            logprobs_mode="processed_logprobs",
            seed=0,
        )
        [model] = self.llm.apply_model(lambda model: model)
        serving.check_built(model, read_shape(model_dir))
        self.recorder = None
        if routers:
            self.recorder = serving.route_recorder(self.llm, routers, max_model_len)
        super().__init__(model, model_dir, quantization)
        self.injector: NoiseInjector | None = None

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
            hardware_error = hardware_error | {"seed": seed}
            # each answer has errors of its own
            sampling = sampling | {"skip_reading_prefix_cache": True}
        recorder = self.recorder if record_routes else None
        with self._policy(noise_step, hardware_error, quantized) as report:
            torch.manual_seed(seed)
            return serving.complete(self.llm, prompts, recorder=recorder, n=n, **sampling), report

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        noise_step: int | None = None,
        hardware_error: dict | None = None,
        quantized: bool = True,
    ) -> list[list[float]]:
        """log p(token t | tokens before it) for every token but the first of each sequence."""
        with self._policy(noise_step, hardware_error, quantized):
            outputs = serving.generate(self.llm, sequences, max_tokens=1, prompt_logprobs=0)
        rows = []
        for output in outputs:
            pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
            rows.append([entry[token].logprob for token, entry in pairs])
        return rows

    @contextlib.contextmanager
    def _policy(
        self, noise_step: int | None, hardware_error: dict | None, quantized: bool
    ) -> Iterator[NoiseReport | None]:
        """The weights, quantised or not, with the noise of a step, computed as other hardware
        would; where more than weights change the experts' fused kernel gives way to torch's
        operators meanwhile.
        """
        if self.injector and self.injector.is_on:
            raise RuntimeError("the noise of an earlier call is still on: it was not taken off")
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM still holds keys and values of an earlier call, by other weights"
            )
        with contextlib.ExitStack() as undo:
            report = None
            if self.injector and noise_step is not None:
                report = self.injector.apply(noise_step)
                undo.callback(self.injector.remove)
            if self.quantized and not quantized:
                self._put(quantized=False)
                undo.callback(self._put, quantized=True)
            if hardware_error or self.quantized and self.quantized.rounds_activations:
                for experts in self.experts:
                    gate_up, down = (self._expert(*pair) for pair in experts.unpacked().items())
                    experts.kernel.apply = partial(plain_experts, gate_up, down)
                    # the class's own is there again
                    undo.callback(delattr, experts.kernel, "apply")
            if hardware_error:
                for layer in packed_linears(self.model):
                    undo.callback(setattr, layer, "cpu_linear", layer.cpu_linear)
                    layer.cpu_linear = linear
                undo.enter_context(HardwareErrorMode(**hardware_error))
            yield report

    def _expert(
        self, parameter: str, weights: torch.Tensor
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """One linear layer of an expert, for `plain_experts`; weights: unpacked, of all experts."""
        if quantized := self.quantized:
            return lambda expert, x: quantized.linear(parameter, x, weights[expert], expert=expert)
        return lambda expert, x: linear(x, weights[expert])
