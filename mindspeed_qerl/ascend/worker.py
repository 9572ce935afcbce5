"""One NPU rank: upstream's integrated worker (actor, reference and rollout in one process) with
adapters, noise and evaluation.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import ray
import torch
from mindspeed_rl.utils.pad_process import truncate_rows
from mindspeed_rl.workers import actor_hybrid_worker
from mindspeed_rl.workers.integrated_worker import IntegratedWorker

from mindspeed_qerl.algorithm.metrics import Metric
from mindspeed_qerl.aqn.injector import NoiseInjector, NoiseReport
from mindspeed_qerl.ascend import loss, ports, proof, routing, weights
from mindspeed_qerl.ascend.limits import epoch_steps
from mindspeed_qerl.ascend.quantized import QuantizedModel
from mindspeed_qerl.ascend.recorder import AscendRecorder
from mindspeed_qerl.common.files import forget_shared_memory
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.lora.adapters import adapters_disabled
from mindspeed_qerl.lora.checkpoint import EXPERTS
from mindspeed_qerl.lora.proof import Movement, join
from mindspeed_qerl.routing.replay import Counts


class QeRLInferEngine(actor_hybrid_worker.VLLMInferEngine):
    """Upstream's vLLM engine with six changes: prompts as token ids, answers with the log-probs
    that they were drawn by and with their routes, AQN on the norms, linear weights that are
    quantised, a seed for each prompt.
    """

    injector: NoiseInjector | None = None  # None: AQN is off
    quantized: QuantizedModel | None = None  # None: nothing is quantised
    quantizes: bool = False  # whether the next weight sync brings quantised weights
    recorder: AscendRecorder | None = None  # None: no routes are asked
    noise_step: int | None = (
        None  # step, from 0, whose noise the next weight sync brings; None: a clean model
    )
    noise_report: NoiseReport | None = None  # of the last sync
    seed_of: tuple[str, int] = (
        "rollout",
        0,
    )  # or "evaluation", and the step: what the next prompts' seeds are of

    def __init__(self, *args: Any, **kwargs: Any):
        """Upstream's; log-probs are of the distribution that is drawn from, temperature included,
        in the sampler of vLLM and in that of vllm-ascend, which does not pass `logprobs_mode` on
        (sample/sampler.py:16).
        """
        super().__init__(*args, **kwargs)
        sampler = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"

    def sync_model_weights(self, params: Any, load_format: str = "megatron") -> None:
        """Upstream's, then quantisation and noise, in any order, since noise is on norms alone:
        vLLM's parameters are views of buffers that are filled by copy at each sync
        (megatron_weight_loaders.py:225,238), so nothing of it can reach the training weights.
        """
        super().sync_model_weights(params, load_format)
        if self.quantized is not None and self.quantizes:
            self.quantized.quantize()
        self.noise_report = None
        if self.injector is not None and self.noise_step is not None:
            self.noise_report = self.injector.apply(self.noise_step)

    def offload_model_weights(self) -> None:
        """Upstream's; the noise goes first, since afterwards the weights lie elsewhere, and int8
        copies are freed.
        """
        if self.quantized is not None:
            self.quantized.free()
        if self.injector is not None:
            self.injector.remove()
        super().offload_model_weights()

    @torch.no_grad()
    def sample(
        self, prompts: list[list[int]], record_routes: bool = False, **sampling: Any
    ) -> list[list[Any]]:
        """For each prompt, token ids, its answers as vLLM's CompletionOutput; with `record_routes`
        and a recorder, which all ranks have or none has, with an attribute `routes`. sampling:
        other sampling parameters.

        Upstream's `generate_sequences` decodes the prompts with skip_special_tokens=True
        (vllm_engine.py:489), which loses the chat template, and cuts the answers at the padding
        token, which a model may say.
        """
        self.init_cache_engine()
        recorder = self.recorder if record_routes else None
        with (
            self.update_sampling_params(**sampling),
            recorder.recording() if recorder else nullcontext(),
        ):
            outputs = self.llm.generate(
                prompts=[{"prompt_token_ids": ids} for ids in prompts],
                sampling_params=[self._sampling_params(ids) for ids in prompts],
                use_tqdm=False,
            )
        self.free_cache_engine()
        groups = [output.outputs for output in outputs]
        if recorder:
            for answer, routes in zip(chain(*groups), chain(*recorder.take(outputs))):
                answer.routes = routes
        return groups

    def _sampling_params(self, prompt: list[int]) -> Any:
        """The sampling parameters for one prompt. With `sampling_config.seed` set, the draw depends
        on that seed, the step and the prompt only; n samples of a prompt get seed, seed + 1, ...
        from vLLM.
        """
        params = self.sampling_params.clone()
        params.logprobs = 0  # of the sampled token alone
        if params.seed is not None:
            purpose, step = self.seed_of
            params.seed = derived_seed(params.seed, f"{purpose}/{prompt}", step)
        return params


@ray.remote(resources={"NPU": 0.7})
class QeRLWorker(IntegratedWorker.__ray_actor_class__):
    """Upstream's IntegratedWorker; `rl_config.qerl` is the Recipe, `rl_config.batches_asked` of
    prompts before this start.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        ports.install_address()
        super().__init__(*args, **kwargs)
        self.batches_sampled = Counter()  # by iteration

    def setup_distributed_rank(self) -> None:
        """Upstream's, which initialises Megatron; our expert class is put in place before the model
        is built.
        """
        ports.install(self.rl_config.qerl.npu.peer_timeout)
        loss.install(self.rl_config.qerl)
        super().setup_distributed_rank()
        if self.megatron_config.lora_target_modules and self.megatron_config.num_experts:
            from mindspeed_qerl.ascend import expert_lora

            expert_lora.install(self.megatron_config.tensor_model_parallel_size)

    def get_consumed_train_samples(self) -> int:
        """Prompts asked before this run was resumed. Upstream adds the batch at each dispatch of an
        update (actor_hybrid_worker.py:334), so that with several dispatches in an iteration it
        would leave prompts out. (Here global_batch_size counts answers, cli/train_grpo.py:99.)
        """
        prompts = self.megatron_config.global_batch_size // self.rl_config.n_samples_per_prompt
        return self.rl_config.batches_asked * prompts

    def _build_rollout(self) -> Any:
        actor_hybrid_worker.VLLMInferEngine = QeRLInferEngine
        # where vLLM puts sockets, which a worker that is killed leaves: in what goes with Ray
        os.environ.setdefault(
            "VLLM_RPC_BASE_PATH", ray._private.worker.global_worker.node.get_temp_dir_path()
        )
        rollout = super()._build_rollout()
        forget_shared_memory()
        # the weight container sees a model without LoRA (weights.py)
        self.actor_model_config.lora_target_modules = None
        recipe = self.rl_config.qerl
        if recipe.noise.enabled:
            rollout.injector = NoiseInjector(
                rollout.model, **recipe.noise_arguments(epoch_steps(recipe))
            )
        if recipe.quantization.enabled:
            rollout.quantized = QuantizedModel(rollout.model, recipe.quantization)
        if recipe.algorithm.routing_replay == "rollout":
            runner = rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
            rollout.recorder = AscendRecorder(
                runner,
                read_shape(recipe.model.path).routers,
                recipe.batch.max_model_len,
                rollout.model,
            )
        return rollout

    def _build_sharding_manager(self) -> Any:
        weights.install()
        return super()._build_sharding_manager()

    def generate_sequences(self) -> None:
        """Upstream's rollout of one batch, with this iteration's noise; its report goes with
        upstream's metrics.
        """
        rollout, batch = self.inference_model, self.batches_sampled[self.iteration]
        self.batches_sampled[self.iteration] += 1
        if (
            batch and self.generate_config.offload_train_param
        ):  # the one before left them on the CPU
            self.actor_offloader.onload_param()
        rollout.noise_step, rollout.quantizes = self.iteration, True
        rollout.seed_of = (f"rollout {batch}" if batch else "rollout", self.iteration)
        super().generate_sequences()
        if rollout.noise_report is not None:
            for name, value in rollout.noise_report.to_metrics().items():
                ray.get(self.td.update_metrics.remote(name, value=[value], cumulate=True))

    def sync_generate_process(
        self,
        batch_data: dict[str, torch.Tensor],
        experience_count: int,
        index: list[int],
        pad_token_id: int,
    ) -> None:
        """Answers to one dispatch of prompts, each of which stands n times side by side, into the
        transfer dock: token ids, their log-probs under the policy that sampled, whether the limit
        cut them off, and routes if asked.
        """
        prompts = truncate_rows(batch_data["prompts"], batch_data["prompt_length"])
        asked = [prompt.tolist() for prompt in prompts[:: self.rl_config.n_samples_per_prompt]]
        answers = [
            answer
            for group in self.inference_model.sample(asked, record_routes=True)
            for answer in group
        ]
        responses = [torch.tensor(answer.token_ids) for answer in answers]
        self.collect_transfer_dock_data(
            {
                "responses": responses,
                "response_length": [torch.tensor([len(response)]) for response in responses],
                "input_ids": [
                    torch.cat([prompt, response])
                    for prompt, response in zip(prompts, responses, strict=True)
                ],
                "rollout_log_prob": [
                    torch.tensor(
                        [
                            of_token[token].logprob
                            for token, of_token in zip(
                                answer.token_ids, answer.logprobs, strict=True
                            )
                        ]
                    )
                    for answer in answers
                ],
                "truncated": [
                    torch.tensor([int(answer.finish_reason == "length")]) for answer in answers
                ],
                **(
                    {routing.COLUMN: [routing.pack(answer.routes) for answer in answers]}
                    if self.inference_model.recorder
                    else {}
                ),
            },
            index,
            use_vllm=True,
            is_generate=True,
        )

    def dispatch_transfer_dock_data(
        self, stage: str, columns: list[str], *args: Any, **kwargs: Any
    ) -> tuple:
        """Upstream's; an update gets the columns that our loss needs, too, and whoever replays
        routes gets those.
        """
        replayed = {
            "none": (),
            "record": ("actor_train",),
            "rollout": ("actor_log_prob", "actor_train"),
        }
        more = loss.COLUMNS if stage == "actor_train" else ()
        if stage in replayed[self.rl_config.qerl.algorithm.routing_replay]:
            more = *more, routing.COLUMN
        return super().dispatch_transfer_dock_data(stage, [*columns, *more], *args, **kwargs)

    def collect_transfer_dock_data(self, output: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Upstream's; the log-probs before the update go with the routes of their pass, if those
        were recorded.
        """
        if "old_log_prob" in output and self.rl_config.qerl.algorithm.routing_replay == "record":
            output[routing.COLUMN] = self.actor_hybrid.train_actor.routes.recorded
        super().collect_transfer_dock_data(output, *args, **kwargs)

    def take_routing(self) -> dict[int, Counts]:
        """What this rank's routers replayed since the last call, by layer."""
        return self.actor_hybrid.train_actor.routes.take_counts()

    def take_weight_squares(self) -> dict[tuple[str, int], tuple[float, float]]:
        """Of this rank's quantised weights in the last rollout (QuantizedModel.squares)."""
        return self.inference_model.quantized.squares

    def take_metrics(self) -> dict[str, Metric]:
        """Of this rank's updates since the last call; of several ranks with the same logits the
        first one's.
        """
        state, found = self.parallel_state, self.actor_hybrid.train_actor.loss_func.take_metrics()
        return (
            found
            if state.get_tensor_model_parallel_rank() == state.get_context_parallel_rank() == 0
            else {}
        )

    def compute_ref_log_prob(self) -> None:
        """Upstream's; PEFT switches its own layers off, and this the experts'."""
        with adapters_disabled(*self.model if self.rl_config.share_backbone else ()):
            super().compute_ref_log_prob()

    def evaluate(
        self, prompts: list[list[int]], n: int, temperature: float, step: int
    ) -> list[tuple[int, list[list[int]]]] | None:
        """(index into prompts, n answers as token ids) for each of this rank's share of `prompts`,
        noise off, on the weights after `step` updates; None from ranks other than the first of
        their group.

        Inference data-parallel group g takes prompts g, g + groups, ...; each takes as many, so
        that none waits.
        """
        rollout, tp = self.inference_model, self.generate_config.infer_tensor_parallel_size
        first, step_size = self._rank // tp, self._world_size // tp
        share = [
            min(index, len(prompts) - 1)
            for index in range(first, first + -(-len(prompts) // step_size) * step_size, step_size)
        ]
        rollout.seed_of = "evaluation", step
        with self._synced(self.rl_config.qerl.quantization.evaluation):
            groups = rollout.sample(
                [prompts[index] for index in share], n=n, temperature=temperature
            )
        if self._rank % tp:
            return None
        return [
            (index, [list(answer.token_ids) for answer in group])
            for index, group in zip(share, groups)
        ]

    @contextmanager
    def _synced(self, quantizes: bool = False) -> Iterator[None]:
        """vLLM with the current weights, noise off; afterwards the training weights are where they
        were.
        """
        self.inference_model.noise_step, self.inference_model.quantizes = None, quantizes
        self.sharding_manager.enter_infer_mode()
        yield
        self.sharding_manager.exit_infer_mode()
        if self.generate_config.offload_train_param:
            self.actor_offloader.onload_param()
        torch.cuda.empty_cache()

    @torch.no_grad()
    def prove(self) -> tuple[Movement, list[str]]:
        """What the adapters did to this rank's weights in vLLM, beside (alpha / r) B A (proof.py),
        and which of the quantised ones are not the rounding of that (QuantizedModel.unlike); all
        ranks at once.
        """
        rollout, config, recipe = self.inference_model, self.actor_model_config, self.rl_config.qerl
        model = rollout.model
        state, tp_size = self.parallel_state, recipe.layout.infer_tp
        place = state.get_tensor_model_parallel_rank(), state.get_expert_model_parallel_rank()
        adapters, shape = proof.adapters_by_layer(self.model), read_shape(recipe.model.path)
        alpha, config.lora_alpha = config.lora_alpha, 0
        with self._synced():
            base = {name: weight.to("cpu", copy=True) for name, weight in proof.held_weights(model)}
        config.lora_alpha = alpha
        found, synced = [], {}
        with self._synced():
            if rollout.quantized:
                synced = {
                    name: weight.to("cpu", copy=True) for name, weight in proof.held_weights(model)
                }
            for layer in range(shape.num_hidden_layers):
                pairs = proof.gather_layer(
                    adapters.get(layer, {}), place, self.megatron_config, shape, layer
                )
                found.append(
                    proof.movement_of_layer(
                        proof.held_weights(model, layer),
                        base,
                        pairs,
                        alpha / config.lora_r,
                        self._rank % tp_size,
                        tp_size,
                    )
                )
        if not rollout.quantized:
            return join(found), []
        with self._synced(quantizes=True):
            return join(found), rollout.quantized.unlike(synced)

    def describe(self) -> dict[str, Any]:
        """What this rank trains and would put noise on: {"lora": {target: {"modules",
        "parameters"}}, "aqn": names of norms}. Over all ranks each layer counts as one module and
        each parameter once, however many hold copies.
        """
        modules, parameters = Counter(), Counter()
        state = self.parallel_state
        first_of_tp = state.get_tensor_model_parallel_rank() == 0
        first_of_ep = state.get_expert_model_parallel_rank() == 0
        for chunk in self.model:
            for name, parameter in chunk.named_parameters():
                if not parameter.requires_grad or "lora_" not in name:
                    continue
                # `...linear_qkv.lora_A.default.weight`, `...experts.weight1_lora_a` of grouped
                # experts
                parts = name.split(".")
                expert = "experts" in parts
                target = (
                    EXPERTS[parts[-1].split("_")[0]]
                    if expert
                    else next(part for part in parts if part.startswith("linear_"))
                )
                replica = (
                    state.get_expert_data_parallel_rank()
                    if expert
                    else state.get_data_parallel_rank(with_context_parallel=True)
                )
                if replica == 0:
                    is_a = name.endswith(("lora_a", "lora_A.default.weight"))
                    modules[target] += is_a and first_of_tp and (first_of_ep or not expert)
                    parameters[target] += (
                        parameter.numel() if first_of_tp or parameter.tensor_model_parallel else 0
                    )
        injector = self.inference_model.injector
        return {
            "lora": {
                target: {"modules": modules[target], "parameters": parameters[target]}
                for target in modules
            },
            "aqn": [target.name for target in injector.targets] if injector else [],
        }
