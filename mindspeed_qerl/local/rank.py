"""One Megatron rank: its part of the policy with adapters, their optimizer, and the weights it
sends to vLLM.
"""

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import (
    clip_grads_with_norm_,
    parameters_to_vector,
    vector_to_parameters,
)

from mindspeed_qerl.algorithm.losses import denominator
from mindspeed_qerl.algorithm.metrics import merge, on_host
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.lora.adapters import adapters_disabled, apply_lora
from mindspeed_qerl.lora.rounding import set_dither
from mindspeed_qerl.recipe.types import Optimizer, Recipe
from mindspeed_qerl.routing.replay import RouteReplay, routing_metrics, total

from . import arithmetic
from .batch import TrainBatch, deal
from .hardware_error import HardwareErrorMode
from .passes import Passes
from .place import Place
from .sharded import AdapterFactors, ShardedAdapters, Trained


class TrainRank:
    """A rank of the training world, which trains its part of the adapters. Every method is called
    on all ranks at once, with the whole batch, of which each trains equally many rows.

    Args:
        shape: of the model in `recipe.model.path`.
        rendezvous: init_method of torch.distributed, for example file:///some/new/file.
    """

    def __init__(self, recipe: Recipe, shape: ModelShape, rank: int, rendezvous: str):
        from .model import SkipPrompts, build_model

        arithmetic.settle()
        adam = recipe.optimizer
        self.recipe = recipe
        self.routers = shape.routers
        place = Place(recipe.layout, shape.moe, rank, rendezvous)
        self.place = place
        model, table, layers, experts = build_model(recipe, shape, place)
        apply_lora(
            model,
            recipe.lora.targets,
            recipe.lora.r,
            recipe.lora.alpha,
            recipe.run.seed,
            layers.start,
            experts.start,
            place.tp_rank,
            place.tp_size,
        )
        model.to(place.device)
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            self.parameters,
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            weight_decay=adam.weight_decay,
        )
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.optimizer = optimizer
        self.adapters = ShardedAdapters(model, table, place, optimizer)
        if recipe.model.dtype == "bfloat16":
            for mapping, layer in self.adapters.layers:
                set_dither(layer.base_layer.weight, mapping, place.tp_rank, place.tp_size)
        self.scheduler = _scheduler(optimizer, adam, recipe.run.train_iters)
        self.replay = None
        if recipe.algorithm.routing_replay != "none":
            self.replay = RouteReplay(model, shape.routers, place.tp_rank, place.tp_size)
        # where tokens are shared in sequence, computed again, or counted by their routes, all
        # layers have all of them
        skip_prompts = None
        if not (place.tp_size > 1 or adam.recompute_granularity or self.replay):
            skip_prompts = next((m for m in model.modules() if isinstance(m, SkipPrompts)), None)
        self.passes = Passes(model, recipe, place, self.replay, skip_prompts)

    def describe(self) -> Trained:
        """Counts what this rank trains, by LoRA target."""
        return self.adapters.describe()

    def merged_weights(self, layer: int) -> dict[str, np.ndarray]:
        """Returns what a sync takes of a layer of this stage."""
        return self.adapters.merged_weights(layer)

    def adapter_factors(self) -> AdapterFactors:
        """Returns what the proof of a sync compares with."""
        return self.adapters.factors()

    def save(self, folder: Path) -> None:
        """Writes the adapters into a checkpoint's folder."""
        self.adapters.save(folder)

    def restore(self, folder: str, updates: int, iteration: int) -> None:
        """Restores the adapters, and the learning rate after `iteration` iterations."""
        self.adapters.restore(folder, updates)
        self.scheduler.step(iteration)

    def rows(self, batch: TrainBatch) -> list[np.ndarray]:
        """This rank's rows of each mini-batch; ranks that share its layers have the same."""
        group = self.place.data_group
        size = self.recipe.batch.mini_answers
        return deal(batch.lengths, size, group.size(), group.rank())

    def logprobs(self, shard: TrainBatch, reference: bool = False) -> np.ndarray:
        """float32 [N, L-1] by the policy, or by the base model (adapters off, experts included, its
        own routes) with `reference`; zeros but on the last pipeline stage.
        """
        if not reference:
            return self.passes.logprobs(shard, self.recipe.batch.actor_forward)
        with adapters_disabled(self.model):
            own = replace(shard, routes=None)
            return self.passes.logprobs(own, self.recipe.batch.ref_forward)

    def logprobs_before(self, batch: TrainBatch) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns of each mini-batch this rank's rows, and `logprobs` of them and those of the base
        model, float32 [2, n, L-1], before this iteration's first update.
        """
        found = []
        with self._arithmetic("arithmetic before the update"):
            for rows in self.rows(batch):
                shard = batch.rows(rows)
                pair = [self.logprobs(shard), self.logprobs(shard, reference=True)]
                found.append((rows, np.stack(pair)))
        return found

    def skip(self) -> None:
        """An iteration without an update: the learning rate moves on."""
        self.scheduler.step(1)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One iteration: passes over the mini-batches, one optimizer step for each. Returns
        metrics, the same on every rank but for time/logprobs and time/update, seconds.
        """
        started = time.perf_counter()
        epochs = self.recipe.batch.epochs
        shards = [batch.rows(rows) for rows in self.rows(batch)]
        with self._arithmetic("arithmetic"):
            if self.recipe.algorithm.loss_has_kl:
                shards = [
                    replace(shard, reference_logprobs=self.logprobs(shard, reference=True))
                    for shard in shards
                ]
            if len(shards) * epochs == 1:  # the policy that is trained is the policy before it
                shards = [replace(shard, old_logprobs=None) for shard in shards]
            elif shards[0].old_logprobs is None:
                shards = [replace(shard, old_logprobs=self.logprobs(shard)) for shard in shards]
            before = time.perf_counter() - started
            metrics = self._update(shards * epochs)
        metrics["time/logprobs"] = before
        metrics["time/update"] = time.perf_counter() - started - before
        return metrics

    def _update(self, shards: list[TrainBatch]) -> dict[str, float]:
        """One optimizer step a shard; metrics of all, the same on each rank."""
        parts = []
        norms = []
        for shard in shards:
            divisor = denominator(torch.from_numpy(shard.mask), self.recipe.algorithm)
            divisor = divisor.float().to(self.place.device)
            dist.all_reduce(divisor, group=self.place.data_group)
            if not divisor:  # every answer was cut off, and those are not trained
                continue
            self.optimizer.zero_grad(set_to_none=False)
            with self.replay.training() if self.replay else nullcontext():
                parts += self.passes.train(shard, float(divisor))
            norms.append(self._reduce_and_clip())
            self.optimizer.step()
            self.adapters.changed()
        merged: dict = on_host(merge(parts))
        # only the last pipeline stage has any
        for group in (self.place.data_group, self.place.pipeline_group):
            merged = merge(_from_every_rank(merged, group))
        metrics = {name: metric.value() for name, metric in merged.items()}
        if self.replay:
            counts_of_ranks = _from_every_rank(self.replay.counts(), dist.group.WORLD)
            metrics |= routing_metrics(total(counts_of_ranks), self.routers)
        metrics["selection/trained_tokens"] = int(merged["mismatch/k1"].count)
        metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["updates"] = len(norms)
        metrics["lr"] = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(1)
        return metrics

    def _reduce_and_clip(self) -> float:
        """Sum gradients over the ranks that share a parameter (docs/architecture.md), clip by the
        global norm; returns the norm before that, over all ranks, each parameter counted once.
        RuntimeError if it is not finite.
        """
        _sum([p for p in self.parameters if p.sequence_parallel], self.place.tp_group)
        _sum([p for p in self.parameters if p.allreduce], self.place.data_group)
        _sum([p for p in self.parameters if not p.allreduce], self.place.expert_data_group)
        square = torch.zeros((), device=self.place.device).double()
        for parameter in self.parameters:
            # an expert is on one rank of each tensor parallel group; of the factors that all of
            # them have whole, the first one's counts
            is_counted = (
                parameter.tensor_model_parallel
                or not parameter.allreduce
                or self.place.tp_rank == 0
            )
            if is_counted and self.place.owns(parameter):
                square += parameter.grad.double().square().sum()
        dist.all_reduce(square)
        norm = math.sqrt(square.item())
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm}: lower actor_config.lr, and look at loss/* in "
                "metrics.jsonl"
            )
        if limit := self.recipe.optimizer.clip_grad:
            clip_grads_with_norm_(self.parameters, limit, square.sqrt())
        return norm

    def _arithmetic(self, purpose: str) -> AbstractContextManager:
        """With the errors of other hardware that training has (docs/quantization.md), drawn for
        this iteration and purpose.
        """
        arguments = self.recipe.hardware_error.arguments("training")
        if not arguments:
            return nullcontext()
        purpose = f"{purpose} of rank {dist.get_rank()}"
        seed = derived_seed(self.recipe.run.seed, purpose, self.scheduler.num_steps)
        return HardwareErrorMode(**arguments, seed=seed)


def _from_every_rank(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """`value` of each rank of `group`, in their order."""
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _sum(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """The gradients of `parameters`, over the ranks of `group`."""
    if not parameters or group.size() == 1:
        return
    gradients = [parameter.grad for parameter in parameters]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat, gradients)


def _scheduler(optimizer: torch.optim.AdamW, settings: Optimizer, iterations: int):
    """megatron-core's schedule of the learning rate."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=int(settings.lr_warmup_fraction * iterations),
        lr_decay_steps=iterations,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=iterations,
        wd_incr_style="constant",
    )
