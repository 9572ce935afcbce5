"""Upstream's vLLM engine with three changes: prompts as token ids, AQN on the norms, and a seed for each prompt."""

from typing import Any

import torch
from mindspeed_rl.models.rollout.vllm_engine import VLLMInferEngine

from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.seeds import derived_seed


class QeRLInferEngine(VLLMInferEngine):
    """The rollout engine of one rank."""

    injector: NoiseInjector | None = None  # None: AQN is off
    noise_step: int | None = None  # step, from 0, whose noise the next weight sync brings; None: a clean model
    noise_report: NoiseReport | None = None  # of the last sync
    seed_of: tuple[str, int] = ("rollout", 0)  # or "evaluation", and the step: what the next prompts' seeds are of

    def sync_model_weights(self, params: Any, load_format: str = "megatron") -> None:
        """Upstream's, then the noise: vLLM's parameters are views of buffers that are filled by copy at each sync
        (megatron_weight_loaders.py:225,238), so nothing of it can reach the training weights."""
        super().sync_model_weights(params, load_format)
        self.noise_report = None
        if self.injector is not None and self.noise_step is not None:
            self.noise_report = self.injector.apply(self.noise_step)

    def offload_model_weights(self) -> None:
        """Upstream's; the noise goes first, since afterwards the weights lie elsewhere."""
        if self.injector is not None:
            self.injector.remove()
        super().offload_model_weights()

    @torch.no_grad()
    def generate_sequences(self, idx_list: list[list[int]], **kwargs: Any) -> tuple[torch.Tensor, Any]:
        """Upstream's text path, with the prompts' token ids given to vLLM as they are: upstream decodes them with
        skip_special_tokens=True (vllm_engine.py:489), which loses the chat template. kwargs: sampling parameters.
        Returns padded token ids [prompts * n, longest], and their logprobs as upstream hands them over."""
        self.init_cache_engine()
        with self.update_sampling_params(**kwargs):
            response = self.llm.generate(prompts=[{"prompt_token_ids": ids} for ids in idx_list],
                                         sampling_params=[self._sampling_params(ids) for ids in idx_list],
                                         use_tqdm=False)
            outputs = self._post_process_outputs(response)
        self.free_cache_engine()
        return outputs

    def _sampling_params(self, prompt: list[int]) -> Any:
        """The sampling parameters for one prompt. With `sampling_config.seed` set, the draw depends on that seed, the
        step and the prompt only; n samples of a prompt get seed, seed + 1, ... from vLLM."""
        params = self.sampling_params.clone()
        if params.seed is not None:
            purpose, step = self.seed_of
            params.seed = derived_seed(params.seed, f"{purpose}/{prompt}", step)
        return params
