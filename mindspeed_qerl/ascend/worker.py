"""One NPU rank: upstream's integrated worker (actor, reference and rollout in one process) with
adapters, noise and evaluation.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import ray
import torch
from mindspeed_rl.utils.pad_process import truncate_rows
from mindspeed_rl.workers import actor_hybrid_worker
from mindspeed_rl.workers.integrated_worker import IntegratedWorker

from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.common.files import forget_shared_memory
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.lora.adapters import adapters_disabled
from mindspeed_qerl.lora.proof import Movement, join

from . import graphs, loss, ports, proof, routing, weights
from .merging import add_dither
from .rollout import QeRLInferEngine, RolloutState

# Stages of upstream's worker that get the routes, if some are replayed.
REPLAYED = ("actor_log_prob", "actor_train")


@ray.remote(resources={"NPU": 0.7})
class QeRLWorker(IntegratedWorker.__ray_actor_class__):
    """A worker of upstream; `rl_config.qerl` is the Recipe, `rl_config.batches_asked` counts
    batches of prompts before this start.
    """

    def __init__(self, *args, **kwargs):
        ports.install_address()
        super().__init__(*args, **kwargs)
        self.recipe = self.rl_config.qerl
        self.batches_sampled = Counter()  # by iteration
        self.noise = None  # NoiseLevel of the next rollouts

    def setup_distributed_rank(self):
        """Upstream's, which initialises Megatron; our classes are put in place before the model is
        built.
        """
        ports.install(self.recipe.npu.peer_timeout)
        loss.install(self.recipe)
        super().setup_distributed_rank()
        config = self.megatron_config
        if config.lora_target_modules:
            from . import lora

            lora.install(config.tensor_model_parallel_size, bool(config.num_experts))

    def get_consumed_train_samples(self):
        """Prompts asked before this run was resumed. Upstream adds the batch at each dispatch of an
        update (actor_hybrid_worker.py:334), so that with several dispatches in an iteration it
        would leave prompts out. (Here global_batch_size counts answers, cli/train_grpo.py:99.)
        """
        prompts = self.megatron_config.global_batch_size // self.rl_config.n_samples_per_prompt
        return self.rl_config.batches_asked * prompts

    def _build_rollout(self):
        actor_hybrid_worker.VLLMInferEngine = QeRLInferEngine
        # where vLLM puts sockets, which a worker that is killed leaves: in what goes with Ray
        folder = ray._private.worker.global_worker.node.get_temp_dir_path()
        os.environ.setdefault("VLLM_RPC_BASE_PATH", folder)
        if not self.recipe.rollout.enforce_eager:
            graphs.install(self.recipe.rollout.max_num_seqs)
        rollout = super()._build_rollout()
        forget_shared_memory()
        # the weight container sees a model without LoRA (weights.py)
        self.actor_model_config.lora_target_modules = None
        rollout.add_ours(self.recipe)
        return rollout

    def _build_sharding_manager(self):
        weights.install()
        if self.recipe.lora.targets and self.megatron_config.bf16:
            add_dither(self.model, read_shape(self.recipe.model.path), self.parallel_state)
        manager = super()._build_sharding_manager()
        offload = manager.offload_infer_params
        # buffers that graphs read stay
        manager.offload_infer_params = lambda: self.inference_model.is_captured or offload()
        return manager

    def generate_sequences(self):
        """Samples one batch as upstream does, with this iteration's noise."""
        batch = self.batches_sampled[self.iteration]
        self.batches_sampled[self.iteration] += 1
        # an earlier batch of this iteration left them on the CPU
        if batch and self.generate_config.offload_train_param:
            self.actor_offloader.onload_param()
        purpose = f"rollout {batch}" if batch else "rollout"
        self.inference_model.state = RolloutState(
            purpose, self.iteration, self.noise, quantized=True
        )
        super().generate_sequences()

    def sync_generate_process(self, batch_data, experience_count, index, pad_token_id):
        """Answers to one dispatch of prompts, each of which stands n times side by side, into the
        transfer dock: token ids, their log-probs under the policy that sampled, whether the limit
        cut them off, and routes if asked.
        """
        prompts = truncate_rows(batch_data["prompts"], batch_data["prompt_length"])
        distinct = [prompt.tolist() for prompt in prompts[:: self.rl_config.n_samples_per_prompt]]
        draws = self._draws(index)
        groups = self.inference_model.sample(distinct, record_routes=True, draws=draws)
        columns = defaultdict(list)
        for prompt, answer in zip(prompts, chain(*groups), strict=True):
            tokens = torch.tensor(answer.token_ids)
            drawn = zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = [candidates[token].logprob for token, candidates in drawn]
            columns["responses"].append(tokens)
            columns["response_length"].append(torch.tensor([len(tokens)]))
            columns["input_ids"].append(torch.cat([prompt, tokens]))
            columns["rollout_log_prob"].append(torch.tensor(logprobs))
            columns["truncated"].append(torch.tensor([int(answer.finish_reason == "length")]))
            if self.inference_model.recorder:
                columns[routing.COLUMN].append(routing.pack(answer.routes))
        self.collect_transfer_dock_data(columns, index, use_vllm=True, is_generate=True)

    def _draws(self, index: list[int]) -> list[int]:
        """Returns the draws of the noise of the answers that lie in these rows of the dock."""
        batch = self.recipe.batch
        before = (self.batches_sampled[self.iteration] - 1) * batch.answers
        n = batch.samples_per_prompt
        draws = self.recipe.noise.draws_of(self.noise, batch.global_batch_size, n, before)
        return [draws[row] for row in index] if draws else []

    def dispatch_transfer_dock_data(self, stage, columns, *args, **kwargs):
        """Upstream's; an update gets the columns that our loss needs, too, and whoever replays
        routes gets those.
        """
        columns = list(columns)  # upstream asks with the same list again
        if stage == "actor_train":
            columns += loss.COLUMNS
            if not self.recipe.algorithm.needs_reference:
                columns.remove("ref_log_prob")
        if stage in REPLAYED and self.inference_model.recorder:
            columns.append(routing.COLUMN)
        return super().dispatch_transfer_dock_data(stage, columns, *args, **kwargs)

    def take_report(self) -> tuple[dict[str, Any], ...]:
        """Returns what this rank did since the last call: the metrics of its updates, of several
        ranks with the same logits the first one's; what its routers replayed, by layer; of the last
        rollout QuantizedModel.squares and the metrics of the noise. {} for what the run does not have.
        """
        actor = self.actor_hybrid.train_actor
        rollout = self.inference_model
        metrics = actor.loss_func.take_metrics()
        if self.parallel_state.get_tensor_model_parallel_rank():
            metrics = {}
        replayed = actor.routes.replay.counts() if actor.routes else {}
        squares = rollout.quantized.squares if rollout.quantized else {}
        noise = rollout.noise_report.to_metrics() if rollout.noise_report else {}
        return metrics, replayed, squares, noise

    def compute_ref_log_prob(self):
        """Upstream's; PEFT switches its own layers off, and this the experts'. Where no coefficient
        asks for it, only what the passes after it rely on: the weights are brought back.
        """
        if not self.recipe.algorithm.needs_reference:
            if self.rl_config.share_backbone and self.generate_config.offload_train_param:
                self.ref_manager.onload_param()
            return
        with adapters_disabled(*self.model if self.rl_config.share_backbone else ()):
            super().compute_ref_log_prob()

    def evaluate(self, prompts: list[list[int]]) -> dict[int, list[list[int]]]:
        """The answers as token ids to each of this rank's share of `prompts`, by index, noise off,
        on the weights of now; empty from ranks other than the first of their group.

        Inference data-parallel group g takes prompts g, g + groups, ...; each takes as many, so
        that none waits: the last prompt is answered again.
        """
        rollout = self.inference_model
        tp = self.generate_config.infer_tensor_parallel_size
        group = self._rank // tp
        groups = self._world_size // tp
        last = len(prompts) - 1
        share = [min(start + group, last) for start in range(0, len(prompts), groups)]
        settings = self.recipe.evaluation
        with self._synced("evaluation", self.recipe.quantization.evaluation):
            answered = rollout.sample(
                [prompts[index] for index in share],
                n=settings.samples_per_problem,
                temperature=settings.temperature,
            )
        if self._rank % tp:
            return {}
        token_ids = [[list(answer.token_ids) for answer in answers] for answers in answered]
        return dict(zip(share, token_ids))

    @contextmanager
    def _synced(self, purpose: str = "proof", quantized: bool = False) -> Iterator[None]:
        """vLLM with the current weights, without noise; afterwards the training weights are where
        they were.
        """
        self.inference_model.state = RolloutState(purpose, self.iteration, quantized=quantized)
        self.sharding_manager.enter_infer_mode()
        yield
        self.sharding_manager.exit_infer_mode()
        if self.generate_config.offload_train_param:
            self.actor_offloader.onload_param()
        torch.cuda.empty_cache()

    @torch.no_grad()
    def prove(self) -> tuple[Movement, list[str]]:
        """Returns what the adapters did to this rank's weights in vLLM, beside (alpha / r) B A
        (proof.py), and which quantized ones are not the rounding of that; all ranks at once.
        """
        rollout = self.inference_model
        config = self.actor_model_config
        state = self.parallel_state
        place = state.get_tensor_model_parallel_rank(), state.get_expert_model_parallel_rank()
        shape = read_shape(self.recipe.model.path)
        adapters = proof.adapters_by_layer(self.model)
        alpha = config.lora_alpha
        config.lora_alpha = 0
        with self._synced():
            base = proof.copied_weights(rollout.model)
        config.lora_alpha = alpha
        movements = []
        unlike = []
        multiplied = {}
        if rollout.quantized:
            with self._synced(quantized=True):
                used = rollout.quantized.used()
                used_base = rollout.quantized.rounded(base)
            multiplied = {name: (used[name], used_base[name]) for name in used}
        copies = partial(
            proof.copies_of, layout=self.recipe.layout, kv_heads=shape.num_key_value_heads
        )
        with self._synced():
            for layer in range(shape.num_hidden_layers):
                pairs = proof.gather_layer(
                    adapters.get(layer, {}), place, self.megatron_config, shape, layer
                )
                weights_now = proof.held_weights(rollout.model, layer)
                scaling = alpha / config.lora_r
                movements.append(
                    proof.movement_of_layer(weights_now, base, pairs, scaling, copies, multiplied)
                )
            if rollout.quantized:
                rounded = rollout.quantized.rounded(proof.copied_weights(rollout.model))
                unlike = [name for name in used if not torch.equal(used[name], rounded[name])]
        return join(movements), unlike

    def describe(self) -> tuple[dict[str, dict[str, int]], list[str]]:
        """Counts what this rank trains, and names the norms that noise goes on, if there is some."""
        injector = self.inference_model.injector
        adapters = proof.count_adapters(self.model, self.parallel_state)
        return adapters, injector.names if injector else []

    def set_noise(self, level: NoiseLevel) -> None:
        """Sets how much noise the next rollouts have."""
        self.noise = level
