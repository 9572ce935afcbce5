"""vLLM samples the answers: weights pushed in place, noise on for rollouts and off for everything
else.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from mindspeed_qerl.algorithm.metrics import mismatch
from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.common.files import forget_shared_memory
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
        aqn: for `add_noise`; None: no noise yet.
        routers: those of the model, whose choices `generate` can record; None: it cannot.
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
        keep_linear_weights()
        # in this process, where its weights can be reached
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        more = serving.use_external_launcher(tp_rank, tp_size, port) if tp_size > 1 else {}
        self.llm = serving.start_vllm(
            model_dir,
            dtype,
            max_model_len,
            max_num_seqs,
            kv_cache_gib,
            share_prompts=routers is None,  # a prompt that is not computed has no routes
            logprobs_mode="processed_logprobs",
            seed=0,
            tensor_parallel_size=tp_size,
            **more,
        )
        if tp_size > 1:
            forget_shared_memory()
        [model] = self.llm.apply_model(lambda model: model)
        serving.check_built(model, read_shape(model_dir))
        self.recorder = None
        if routers:
            self.recorder = serving.route_recorder(self.llm, routers, max_model_len)
        super().__init__(model, model_dir, quantization, tp_rank, tp_size)
        self.injector: NoiseInjector | None = None
        if aqn:
            self.add_noise(aqn)

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
        # vLLM wants room for one token more
        longest = self.llm.llm_engine.model_config.max_model_len - 1
        sequences = [[*prompt, *answer][:longest] for prompt, answer in zip(prompts, answers)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        starts = torch.tensor([len(prompt) for prompt in prompts]) - 1
        place = torch.arange(lengths.max().item() - 1)
        mask = (place >= starts[:, None]) & (place < lengths[:, None] - 1)

        def logprobs(quantized: bool, noise_step: int | None) -> torch.Tensor:
            rows = self.logprobs(sequences, noise_step, quantized=quantized)
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

        with self._policy(noise_step, None, quantized=True) as noise:
            sigma = noise.measured_std if noise else 0.0
        # by name of the metric: quantised, noise
        policies: dict[str, tuple[bool, int | None]] = {"": (True, None)}
        if sigma:
            policies |= {"noise_": (False, noise_step), "together_": (True, noise_step)}
        clean, metrics = logprobs(False, None), {}
        for name, policy in policies.items():
            difference = mismatch(logprobs(*policy), clean, mask)
            for which in ("k3", "effective_sample_size"):
                value = difference[f"mismatch/{which}"].value()
                metrics[f"quantization/{name}{which}"] = value
        noise_k3 = metrics.get("quantization/noise_k3", 0.0)
        if noise_k3 > 0:
            ratio = metrics["quantization/k3"] / noise_k3
            metrics["quantization/equivalent_sigma"] = sigma * math.sqrt(ratio)
        return metrics

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
