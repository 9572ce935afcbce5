"""vLLM on one NPU rank: upstream's engine with our sampling, noise and quantization."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from mindspeed_rl.workers import actor_hybrid_worker
from vllm_ascend.utils import enable_sp

from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.rows import requests_of_answers
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe

from .graphs import DecodeGraphs
from .quantized import QuantizedModel
from .recorder import AscendRecorder


@dataclass(frozen=True)
class RolloutState:
    """Describes what vLLM samples by from the next weight sync on.

    Attributes:
        purpose, step: such as "rollout" or "evaluation", after how many updates: the seeds of its
            prompts are derived from both.
        noise: of the norms; None: none. quantized: whether linear weights are, if some may be.
    """

    purpose: str
    step: int
    noise: NoiseLevel | None = None
    quantized: bool = False


class QeRLInferEngine(actor_hybrid_worker.VLLMInferEngine):
    """An engine of upstream, vLLM, with seven changes: prompts as token ids, answers with the
    log-probs that they were drawn by and with their routes, AQN on the norms, linear weights that
    are quantized, a seed for each prompt, captured decoding.

    Attributes:
        injector, quantized, recorder, graphs: a NoiseInjector, QuantizedModel, AscendRecorder and
            DecodeGraphs; None where there is no noise, no quantization, no replay of the rollout's
            routes, no captured decoding. state: of the next weight sync. noise_report: NoiseReport
            of the last one; None: it had no noise.
    """

    injector = quantized = recorder = graphs = noise_report = None
    state = RolloutState("rollout", 0)

    def __init__(self, *args, **kwargs):
        """Upstream's; log-probs are of the distribution that is drawn from, temperature included,
        in the sampler of vLLM and in that of vllm-ascend, which does not pass `logprobs_mode` on
        (sample/sampler.py:16).
        """
        super().__init__(*args, **kwargs)
        sampler = self.runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"

    @property
    def runner(self) -> Any:
        """vllm-ascend's model runner."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def add_ours(self, recipe: Recipe) -> None:
        """Adds what `recipe` asks for and upstream lacks."""
        if noise := recipe.noise_arguments:
            stays = not recipe.rollout.enforce_eager
            if recipe.noise.draws != "step" and enable_sp(self.runner.vllm_config):
                raise EngineError(
                    f"aqn.draws = {recipe.noise.draws!r}: VLLM_ASCEND_ENABLE_FLASHCOMM1 shares the "
                    "rows of a batch out among ranks, and nobody knows whose draw they have. Unset "
                    "it, or take aqn.draws=step"
                )
            self.injector = NoiseInjector(self.model, runner=self.runner, stays=stays, **noise)
        if recipe.quantization.enabled:
            self.quantized = QuantizedModel(self.model, recipe.quantization.format)
        if recipe.algorithm.routing_replay == "rollout":
            routers = read_shape(recipe.model.path).routers
            longest = recipe.batch.max_model_len
            self.recorder = AscendRecorder(self.runner, routers, longest, self.model)
        if not recipe.rollout.enforce_eager:
            self.graphs = DecodeGraphs(self.runner)
            if self.recorder:
                self.graphs.on_replay = self.recorder.replay

    @property
    def is_captured(self) -> bool:
        """True once graphs hold the memory of weights and KV cache, which stays from then on."""
        return bool(self.graphs) and self.graphs.addresses is not None

    def init_cache_engine(self):
        """Upstream's, which empties the prefix cache of a KV cache that it makes; then graphs."""
        if self.is_captured:
            self.llm.llm_engine.reset_prefix_cache()
        else:
            super().init_cache_engine()
        if self.graphs:
            self.graphs.ready()

    def free_cache_engine(self):
        if not self.is_captured:
            super().free_cache_engine()

    def sync_model_weights(self, params, load_format="megatron"):
        """Upstream's, then quantization and noise, in any order, since noise is on norms alone:
        vLLM's parameters are views of buffers that are filled by copy at each sync
        (megatron_weight_loaders.py:225,238), so nothing of it can reach the training weights.
        """
        super().sync_model_weights(params, load_format)
        if self.quantized and self.state.quantized:
            self.quantized.quantize()
        self.noise_report = None
        if self.injector and self.state.noise:
            self.noise_report = self.injector.apply(self.state.noise)

    def offload_model_weights(self):
        """Upstream's; the noise goes first, since afterwards the weights lie elsewhere, and int8
        copies are freed.
        """
        if self.quantized:
            self.quantized.free()
        if self.injector:
            self.injector.remove()
        if not self.is_captured:
            super().offload_model_weights()

    @torch.no_grad()
    def sample(
        self,
        prompts: list[list[int]],
        record_routes: bool = False,
        draws: Sequence[int] = (),
        **sampling: Any,
    ) -> list[list[Any]]:
        """For each prompt, token ids, its answers as vLLM's CompletionOutput; with `record_routes`
        and a recorder, which all ranks have or none has, with an attribute `routes`. draws: of the
        noise that of each answer, if not all have one. sampling: other sampling parameters.

        Upstream's `generate_sequences` decodes the prompts with skip_special_tokens=True
        (vllm_engine.py:489), which loses the chat template, and cuts the answers at the padding
        token, which a model may say.
        """
        self.init_cache_engine()
        recorder = self.recorder if record_routes else None
        recording = recorder.recording() if recorder else nullcontext()
        with self.update_sampling_params(**sampling), recording:
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            params = [self._sampling_params(ids) for ids in prompts]
            n = params[0].n
            if draws:
                asked, params = requests_of_answers(asked, params, draws)
            outputs = self.llm.generate(prompts=asked, sampling_params=params, use_tqdm=False)
        self.free_cache_engine()
        answers = list(chain.from_iterable(output.outputs for output in outputs))
        routes = recorder.take(outputs) if recorder else []
        for answer, recorded in zip(answers, chain(*routes)):
            answer.routes = recorded
        return [answers[start : start + n] for start in range(0, len(answers), n)]

    def _sampling_params(self, prompt: list[int]) -> Any:
        """The sampling parameters for one prompt. With `sampling_config.seed` set, the draw depends
        on that seed, the step and the prompt only; n samples of a prompt get seed, seed + 1, ...
        from vLLM.
        """
        params = self.sampling_params.clone()
        params.logprobs = 0  # of the sampled token alone
        if params.seed is not None:
            purpose = f"{self.state.purpose}/{prompt}"
            params.seed = derived_seed(params.seed, purpose, self.state.step)
        return params
