"""One NPU rank: upstream's integrated worker (actor, reference and rollout in one process) with adapters, noise and
evaluation."""

from collections import Counter
from typing import Any

import ray
import torch
from mindspeed_rl.workers import actor_hybrid_worker
from mindspeed_rl.workers.integrated_worker import IntegratedWorker

from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.ascend import ports, weights
from mindspeed_qerl.ascend.settings import epoch_steps
from mindspeed_qerl.lora.adapters import adapters_disabled
from mindspeed_qerl.lora.checkpoint import EXPERTS
from mindspeed_qerl.seeds import derived_seed


class QeRLInferEngine(actor_hybrid_worker.VLLMInferEngine):
    """Upstream's vLLM engine with three changes: prompts as token ids, AQN on the norms, a seed for each prompt."""

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


@ray.remote(resources={"NPU": 0.7})
class QeRLWorker(IntegratedWorker.__ray_actor_class__):
    """Upstream's IntegratedWorker; `rl_config.qerl` is the Recipe."""

    def setup_distributed_rank(self) -> None:
        """Upstream's, which initialises Megatron; our expert class is put in place before the model is built."""
        ports.install(self.rl_config.qerl.npu.peer_timeout)
        super().setup_distributed_rank()
        if self.megatron_config.lora_target_modules and self.megatron_config.num_experts:
            from mindspeed_qerl.ascend import expert_lora

            expert_lora.install(self.megatron_config.tensor_model_parallel_size)

    def get_consumed_train_samples(self) -> int:
        """Prompts asked so far. Upstream adds the batch at each dispatch of an update (actor_hybrid_worker.py:334), so
        that with several dispatches in an iteration a resumed run would leave prompts out. (Here global_batch_size
        counts answers, cli/train_grpo.py:99.)"""
        return self.get_iteration() * self.megatron_config.global_batch_size // self.rl_config.n_samples_per_prompt

    def _build_rollout(self) -> Any:
        actor_hybrid_worker.VLLMInferEngine = QeRLInferEngine
        rollout = super()._build_rollout()
        # the weight container sees a model without LoRA (weights.py)
        self.actor_model_config.lora_target_modules = None
        recipe = self.rl_config.qerl
        if recipe.noise.enabled:
            rollout.injector = NoiseInjector(rollout.model, **recipe.noise_arguments(epoch_steps(recipe)))
        return rollout

    def _build_sharding_manager(self) -> Any:
        weights.install()
        return super()._build_sharding_manager()

    def generate_sequences(self) -> None:
        """Upstream's rollout of one iteration, with this iteration's noise; its report goes with upstream's
        metrics."""
        rollout = self.inference_model
        rollout.noise_step, rollout.seed_of = self.iteration, ("rollout", self.iteration)
        super().generate_sequences()
        if rollout.noise_report is not None:
            for name, value in rollout.noise_report.to_metrics().items():
                ray.get(self.td.update_metrics.remote(name, value=[value], cumulate=True))

    def compute_ref_log_prob(self) -> None:
        """Upstream's; PEFT switches its own layers off, and this the experts'."""
        with adapters_disabled(*self.model if self.rl_config.share_backbone else ()):
            super().compute_ref_log_prob()

    def evaluate(self, prompts: list[list[int]], n: int, temperature: float,
                 step: int) -> list[tuple[int, list[list[int]]]] | None:
        """(index into prompts, n answers as token ids) for each of this rank's share of `prompts`, noise off, on the
        weights after `step` updates; None from ranks other than the first of their group.

        Inference data-parallel group g takes prompts g, g + groups, ...; each takes as many, so that none waits.
        """
        rollout, tp = self.inference_model, self.generate_config.infer_tensor_parallel_size
        group, groups = self._rank // tp, self._world_size // tp
        share = [min(index, len(prompts) - 1)
                 for index in range(group, group + -(-len(prompts) // groups) * groups, groups)]
        rollout.noise_step, rollout.seed_of = None, ("evaluation", step)
        self.sharding_manager.enter_infer_mode()
        tokens, _ = rollout.generate_sequences([prompts[index] for index in share], n=n, temperature=temperature)
        self.sharding_manager.exit_infer_mode()
        if self.generate_config.offload_train_param:
            self.actor_offloader.onload_param()
        torch.cuda.empty_cache()
        if self._rank % tp:
            return None
        answers = tokens.view(len(share), n, -1).tolist()
        return [(index, answers[i]) for i, index in enumerate(share)]

    def describe(self) -> dict[str, Any]:
        """What this rank trains and would put noise on: {"lora": {target: {"modules", "parameters"}}, "aqn": names of
        norms}. Over all ranks each layer counts as one module and each parameter once, however many hold copies."""
        modules, parameters = Counter(), Counter()
        state = self.parallel_state
        first_of_tp = state.get_tensor_model_parallel_rank() == 0
        first_of_ep = state.get_expert_model_parallel_rank() == 0
        for chunk in self.model:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad or "lora_" not in name:
                    continue
                # `...linear_qkv.lora_A.default.weight`, `...experts.weight1_lora_a` of grouped experts
                parts = name.split(".")
                expert = "experts" in parts
                target = (EXPERTS[parts[-1].split("_")[0]] if expert
                          else next(part for part in parts if part.startswith("linear_")))
                replica = (state.get_expert_data_parallel_rank() if expert
                           else state.get_data_parallel_rank(with_context_parallel=True))
                if replica == 0:
                    is_a = name.endswith(("lora_a", "lora_A.default.weight"))
                    modules[target] += is_a and first_of_tp and (first_of_ep or not expert)
                    parameters[target] += parameter.numel() if first_of_tp or parameter.tensor_model_parallel else 0
        injector = self.inference_model.injector
        return {"lora": {target: {"modules": modules[target], "parameters": parameters[target]} for target in modules},
                "aqn": [target.name for target in injector.targets] if injector else []}
