"""One Megatron rank: its part of the policy with adapters, their optimizer, and the weights it
sends to vLLM.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad

from mindspeed_qerl.algorithm.losses import (
    LossInputs,
    denominator,
    loss,
    token_entropy,
    token_logprobs,
)
from mindspeed_qerl.algorithm.metrics import Mean, Metric, merge
from mindspeed_qerl.common.seeds import derived_seed
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.tensors import Mapping, Split
from mindspeed_qerl.local.batch import Batch
from mindspeed_qerl.local.checkpoint import write_tensors
from mindspeed_qerl.local.hardware_error import HardwareErrorMode
from mindspeed_qerl.lora.adapters import LoRALinear, adapters_disabled, apply_lora, lora_layers
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.replay import MicroBatch, RouteReplay, routing_metrics, total
from mindspeed_qerl.runs.checks import logprobs_fault
from mindspeed_qerl.tasks.prompts import text_of

SUFFIXES = (
    "",
    ".exp_avg",
    ".exp_avg_sq",
)  # in checkpoints, of a factor and of AdamW's state, torch's names


class TrainRank:
    """A rank of the training world. Every method is called on all ranks at once; those of one
    data-parallel rank get the same shard, and all shards are of equal size.
    """

    def __init__(self, recipe: Recipe, rank: int, rendezvous: str):
        """rendezvous: init_method of torch.distributed, for example file:///some/new/file."""
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="lo")
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device(
            "cpu"
        )
        if self.device.type == "cpu":
            from mindspeed_qerl.emulation import cuda_on_cpu

            cuda_on_cpu.install()
        else:
            torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        from megatron.core import parallel_state
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from mindspeed_qerl.local.model import SkipPrompts, build_model

        layout, shape = recipe.layout, read_shape(recipe.model.path)
        backend = dist.get_default_backend_for_device(
            self.device
        )  # gloo, nccl; torch_npu adds hccl
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=layout.world)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.tp * layout.ep if shape.moe else 1,
            expert_tensor_parallel_size=1,
        )
        self.recipe = recipe
        self.tp_group, self.tp_size = parallel_state.get_tensor_model_parallel_group(), layout.tp
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.expert_data_group = parallel_state.get_expert_data_parallel_group()
        adam = recipe.optimizer
        recompute = (
            (adam.recompute_num_layers or shape.num_hidden_layers)
            if adam.recompute_granularity
            else 0
        )
        self.model, table, layers, experts = build_model(
            recipe.model.path, getattr(torch, recipe.model.dtype), layout, recompute
        )
        self.table = {mapping.megatron: mapping for mapping in table}
        apply_lora(
            self.model,
            recipe.lora.targets,
            recipe.lora.r,
            recipe.lora.alpha,
            recipe.run.seed,
            layers.start,
            experts.start,
            self.tp_rank,
            self.tp_size,
        )
        self.model.to(self.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            weight_decay=adam.weight_decay,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=adam.lr,
            min_lr=adam.min_lr,
            lr_warmup_steps=int(adam.lr_warmup_fraction * recipe.run.train_iters),
            lr_decay_steps=recipe.run.train_iters,
            lr_decay_style=adam.lr_decay_style,
            start_wd=adam.weight_decay,
            end_wd=adam.weight_decay,
            wd_incr_steps=recipe.run.train_iters,
            wd_incr_style="constant",
        )
        self.routers, mode = shape.routers, recipe.algorithm.routing_replay
        self.replay = (
            RouteReplay(self.model, shape.routers, self.tp_rank, self.tp_size)
            if mode != "none"
            else None
        )
        self.parts = self._divide_sync()
        # where tokens are shared in sequence, computed again, or counted by their routes, all
        # layers have all of them
        whole = self.tp_size > 1 or recompute or self.replay
        self.skip_prompts = next(
            (m for m in self.model.modules() if isinstance(m, SkipPrompts) and not whole), None
        )
        arithmetic = recipe.hardware_error.arguments("training")
        self.hardware_error = HardwareErrorMode(**arithmetic) if arithmetic else None

    def describe(self) -> tuple[dict[str, dict[str, int]], int]:
        """(per LoRA target its modules and parameters, parts of the sync); a layer that several
        ranks hold is counted by the one that answers for it.
        """
        counted = {}
        for name, layer in lora_layers(self.model):
            entry = counted.setdefault(name.rpartition(".")[2], {"modules": 0, "parameters": 0})
            if self._owns(layer.lora_A) and (layer.tp_size == 1 or self.tp_rank == 0):
                entry["modules"] += 1
                entry["parameters"] += sum(rows * columns for rows, columns in _whole_shapes(layer))
        return counted, len(self.parts)

    def _owns(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank answers for `parameter` among the data-parallel ranks that hold the
        same.
        """
        return (self.data_group if parameter.allreduce else self.expert_data_group).rank() == 0

    def _run(
        self,
        shard: Batch,
        size: int,
        outcome: Callable,
        forward_only: bool = False,
        recorded: list[MicroBatch] | None = None,
    ) -> list:
        """megatron-core's 1F1B schedule over micro-batches of `size` answers (one stage: forward,
        backward, ...).

        On the last stage `outcome(rows, micro, logprobs)` is called with the log probability of
        each next token, float32 [n, l-1], and returns the result; without `forward_only` it is
        called with its entropy, too, both 0 where no answer has begun, and returns (loss, result).
        Returns the results. The routes of the shard, if it has some, are replayed; `recorded` is
        given those that each micro-batch took.
        """
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving,
        )
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        def forward_step(iterator, model):
            rows, micro = next(iterator)
            length = micro.tokens.shape[1]
            first = 0
            if self.skip_prompts:
                self.skip_prompts.first = first = (
                    0 if forward_only else int(micro.mask.any(0).argmax())
                )
            tokens = self._tensor(
                np.pad(micro.tokens, ((0, 0), (0, -length % self.tp_size)))
            )  # shared in sequence
            positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
            with contextlib.ExitStack() as replay:
                if micro.routes is not None or recorded is not None:
                    routes, known = micro.routes_by_position(tokens.shape[1])
                    routes = MicroBatch(
                        None if routes is None else self._tensor(routes), self._tensor(known)
                    )
                    replay.enter_context(self.replay.forward(routes))
                    if recorded is not None:
                        recorded.append(routes)
                logits = model(tokens, positions, None)

            def finish(logits, non_loss_data=False):
                logits = gather_from_tensor_model_parallel_region(logits)[:, : length - 1 - first]
                temperature = self.recipe.sampling.temperature
                logprobs = pad(
                    token_logprobs(logits, tokens[:, first + 1 : length], temperature), (first, 0)
                )
                self._check(micro, logprobs)
                if forward_only:
                    return outcome(rows, micro, logprobs)
                with torch.set_grad_enabled(self.recipe.algorithm.entropy_coefficient > 0):
                    entropy = pad(token_entropy(logits, temperature), (first, 0))
                loss, result = outcome(rows, micro, logprobs, entropy)
                return loss, torch.zeros((), dtype=torch.int, device=self.device), result

            return logits, finish

        parts = [
            np.arange(start, min(start + size, len(shard))) for start in range(0, len(shard), size)
        ]
        return forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=((rows, shard.rows(rows)) for rows in parts),
            model=self.model,
            num_microbatches=len(parts),
            seq_length=shard.tokens.shape[1],
            micro_batch_size=size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _check(self, micro: Batch, logprobs: torch.Tensor) -> None:
        """RuntimeError that names the answer where a log probability of a token to train is none."""
        if fault := logprobs_fault(
            logprobs.detach().cpu().numpy(),
            micro.mask,
            micro.tokens[:, 1:],
            partial(text_of, self.recipe.model.path),
        ):
            raise RuntimeError(fault)

    @torch.no_grad()
    def logprobs(
        self, shard: Batch, reference: bool = False, recorded: list[MicroBatch] | None = None
    ) -> np.ndarray:
        """float32 [N, L-1] by the policy, or by the base model (adapters off, experts included, its
        own routes) with `reference`; zeros but on the last pipeline stage. recorded: see `_run`.
        """
        result = np.zeros(shard.mask.shape, dtype=np.float32)

        def keep(rows, micro, logprobs):
            result[rows, : logprobs.shape[1]] = logprobs.cpu().numpy()

        size = self.recipe.batch.ref_forward if reference else self.recipe.batch.actor_forward
        with adapters_disabled(self.model) if reference else contextlib.nullcontext():
            self._run(
                replace(shard, routes=None) if reference else shard, size, keep, True, recorded
            )
        return result

    def recorded(self, shard: Batch) -> Batch:
        """`shard` with the log-probs of the policy as it is, and the routes of that pass, of this
        rank's layers.
        """
        micros, size = [], self.recipe.batch.actor_forward
        logprobs = self.logprobs(shard, recorded=micros)
        routes = np.zeros(
            (*shard.mask.shape, len(self.routers.layers), self.routers.top_k), self.routers.dtype
        )
        for start, micro in zip(range(0, len(shard), size), micros):
            of_micro = routes[start : start + size]
            for layer, chosen in micro.chosen.items():
                if len(chosen) < len(
                    micro.known
                ):  # under sequence parallelism a rank decides for its part
                    parts = [torch.empty_like(chosen) for _ in range(self.tp_size)]
                    dist.all_gather(parts, chosen.contiguous(), group=self.tp_group)
                    chosen = torch.cat(parts)
                by_answer = (
                    chosen.cpu()
                    .numpy()
                    .reshape(-1, len(of_micro), self.routers.top_k)
                    .swapaxes(0, 1)
                )
                length = min(routes.shape[1], by_answer.shape[1])
                of_micro[:, :length, self.replay.index[layer]] = by_answer[:, :length]
        return replace(shard, old_logprobs=logprobs, routes=routes)

    def skip(self) -> None:
        """An iteration without an update: the learning rate moves on."""
        self.scheduler.step(1)

    @contextlib.contextmanager
    def _arithmetic(self, purpose: str) -> Iterator[None]:
        """With the errors of other hardware that training has (docs/quantization.md), drawn for
        this iteration and purpose.
        """
        if self.hardware_error:
            self.hardware_error.generator.manual_seed(
                derived_seed(
                    self.recipe.run.seed,
                    f"{purpose} of rank {dist.get_rank()}",
                    self.scheduler.num_steps,
                )
            )
        with self.hardware_error or contextlib.nullcontext():
            yield

    def logprobs_before(self, shards: list[Batch]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each shard (`logprobs`, `logprobs` of the base model), before this iteration's first
        update.
        """
        with self._arithmetic("arithmetic before the update"):
            return [
                (self.logprobs(shard), self.logprobs(shard, reference=True)) for shard in shards
            ]

    def train(self, shards: list[Batch], epochs: int = 1) -> dict[str, float]:
        """One iteration: `epochs` passes over the mini-batches, one optimizer step for each.
        shards: this rank's part of each. Returns its metrics, the same on every rank but for
        time/logprobs and time/update, seconds.
        """
        started = time.perf_counter()
        with self._arithmetic("arithmetic"):
            if self.recipe.algorithm.routing_replay == "record":
                shards = [self.recorded(shard) for shard in shards]
            if self.recipe.algorithm.loss_kl_coefficient > 0:
                shards = [
                    replace(shard, reference_logprobs=self.logprobs(shard, reference=True))
                    for shard in shards
                ]
            if (
                len(shards) * epochs == 1
            ):  # with a single update the policy that is trained is the policy before it
                shards = [replace(shard, old_logprobs=None) for shard in shards]
            elif shards[0].old_logprobs is None:
                shards = [replace(shard, old_logprobs=self.logprobs(shard)) for shard in shards]
            forward_seconds = time.perf_counter() - started
            metrics = self._update(shards * epochs)
        seconds = time.perf_counter() - started
        return {
            **metrics,
            "time/logprobs": forward_seconds,
            "time/update": seconds - forward_seconds,
        }

    def _update(self, shards: list[Batch]) -> dict[str, float]:
        parts, grad_norms, counts = [], [], []
        updates = 0
        for shard in shards:
            divisor = torch.tensor(
                denominator(self._tensor(shard.mask), self.recipe.algorithm), device=self.device
            )
            dist.all_reduce(divisor, group=self.data_group)
            if (
                not divisor
            ):  # every answer of this mini-batch was cut off, and those are not trained
                continue
            updates += 1
            self.optimizer.zero_grad(set_to_none=False)
            with self.replay.training() if self.replay else contextlib.nullcontext():
                parts += self._run(
                    shard, self.recipe.batch.micro_batch_size, partial(self._loss, float(divisor))
                )
            if self.replay:
                counts.append(self.replay.counts())
            grad_norms.append(self._reduce_and_clip())
            self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(1)
        merged = self._merge_over_ranks(parts)
        reduced = {name: metric.value() for name, metric in merged.items()}
        if self.replay:
            of_ranks = [{}] * self.recipe.layout.world
            dist.all_gather_object(of_ranks, total(counts))
            reduced |= routing_metrics(total(of_ranks), self.routers)
        return {
            **reduced,
            "selection/trained_tokens": merged["mismatch/k1"].count,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "lr": lr,
            "updates": updates,
        }

    def _loss(
        self,
        divisor: float,
        rows: np.ndarray,
        micro: Batch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """What `backward` gets of one micro-batch, and its metrics. divisor: of the whole
        mini-batch.
        """
        old, reference = micro.old_logprobs, micro.reference_logprobs
        inputs = LossInputs(
            logprobs,
            logprobs.detach() if old is None else self._tensor(old),
            *map(self._tensor, (micro.rollout_logprobs, micro.advantages, micro.mask)),
            None if reference is None else self._tensor(reference),
            entropy,
        )
        total, metrics = loss(inputs, self.recipe.algorithm, self.recipe.correction)
        trained = total / divisor
        # logged is what is trained
        return trained, metrics | {
            "loss/total": Mean(trained.item() * divisor, metrics["loss/total"].count)
        }

    def _merge_over_ranks(self, parts: list[dict[str, Metric]]) -> dict[str, Metric]:
        """This rank's metrics and all other ranks', the same on each. Only the last pipeline stage
        has any.
        """
        merged = merge(parts)
        for group in (self.data_group, self.pipeline_group):
            of_ranks = [{}] * group.size()
            dist.all_gather_object(of_ranks, merged, group=group)
            merged = merge(of_ranks)
        return merged

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _reduce_and_clip(self) -> float:
        """Sum gradients over the ranks that share a parameter (docs/architecture.md), clip by the
        global norm; returns the norm before that.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group, shared in (
            (self.tp_group, [p for p in self.parameters if p.sequence_parallel]),
            (self.data_group, [p for p in self.parameters if p.allreduce]),
            (self.expert_data_group, [p for p in self.parameters if not p.allreduce]),
        ):
            if shared and group.size() > 1:
                flat = torch.cat([p.grad.reshape(-1) for p in shared])
                dist.all_reduce(flat, group=group)
                for parameter, part in zip(shared, flat.split([p.numel() for p in shared])):
                    parameter.grad.copy_(part.view_as(parameter))
        # An expert is on one rank of each tensor parallel group; rank 0 answers for the factors
        # that all have whole.
        counted = [
            p
            for p in self.parameters
            if self._owns(p) and (p.tensor_model_parallel or self.tp_rank == 0 or not p.allreduce)
        ]
        square = sum(
            (p.grad.double().square().sum() for p in counted),
            torch.zeros((), device=self.device).double(),
        )
        dist.all_reduce(square)
        norm = math.sqrt(square.item())
        if not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm}: lower actor_config.lr, and look at loss/* in "
                "metrics.jsonl"
            )
        if self.recipe.optimizer.clip_grad > 0 and norm > self.recipe.optimizer.clip_grad:
            for parameter in self.parameters:
                parameter.grad.mul_(self.recipe.optimizer.clip_grad / (norm + 1e-6))
        return norm

    def _adapted(self) -> Iterator[tuple[Mapping, LoRALinear]]:
        """(mapping, adapter) of the adapted layers."""
        return ((self.table[name + ".weight"], layer) for name, layer in lora_layers(self.model))

    def _owned(self) -> Iterator[tuple[Mapping, LoRALinear]]:
        """Of the adapted layers those that this rank answers for, together with its tensor parallel
        group.
        """
        return ((mapping, layer) for mapping, layer in self._adapted() if self._owns(layer.lora_A))

    def _divide_sync(self) -> list[list[tuple[Mapping, LoRALinear]]]:
        """The adapted layers in parts whose merged weights fill the transfer buffer, or are a
        single larger one.
        """
        parts, filled = [], math.inf
        for mapping, layer in self._owned():
            size = (
                4 * layer.base_layer.input_size * layer.base_layer.output_size
            )  # they travel as float32
            if filled + size > self.recipe.local.sync_buffer_mib * 2**20:
                parts.append([])
                filled = 0
            parts[-1].append((mapping, layer))
            filled += size
        return parts

    def _whole(self, shard: torch.Tensor, shared: Split | None) -> torch.Tensor | None:
        """The whole tensor on the first rank of the tensor parallel group, None on the others, if
        it is shared.
        """
        if shared is None or self.tp_size == 1:
            return shard
        shard = shard.contiguous()
        shards = (
            [torch.empty_like(shard) for _ in range(self.tp_size)] if self.tp_rank == 0 else None
        )
        dist.gather(shard, shards, dst=dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return shared.join(shards) if shards else None

    def merged_weights(self, part: int) -> dict[str, np.ndarray]:
        """HF name -> W + (alpha / r) B A, of one part (`describe`) of the adapted layers this rank
        answers for.
        """
        merged = {}
        for mapping, layer in self.parts[part] if part < len(self.parts) else ():
            weight = self._whole(layer.merged_weight().float(), mapping.shared)
            if weight is not None:
                for name, tensor in zip(mapping.hf, mapping.split(weight)):
                    merged[name] = tensor.contiguous().cpu().numpy()
        return merged

    def _whole_factors(
        self, mapping: Mapping, layer: LoRALinear, a: torch.Tensor, b: torch.Tensor
    ) -> tuple | None:
        """(A, B) whole, from this rank's parts of both or of their gradients; None where others
        answer for them.
        """
        split_input = layer.row_parallel and layer.tp_size > 1
        a = self._whole(a, mapping.shared if split_input else None)
        b = self._whole(b, None if split_input else mapping.shared)
        return (a, b) if layer.tp_size == 1 or self.tp_rank == 0 else None

    @torch.no_grad()
    def adapter_factors(self) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
        """HF name -> (target, (alpha / r) B [out, r], A [r, in]): the rollout engine's proof uses
        them.
        """
        factors = {}
        for mapping, layer in self._owned():
            if whole := self._whole_factors(
                mapping, layer, layer.lora_A, layer.scaling * layer.lora_B
            ):
                target = mapping.megatron.split(".")[-2]
                for name, b in zip(mapping.hf, mapping.split(whole[1])):
                    factors[name] = (target, b.contiguous().cpu().numpy(), whole[0].cpu().numpy())
        return factors

    @torch.no_grad()
    def save(self, folder: str) -> None:
        """Write adapters and moments of the layers this rank answers for into `folder`, whole."""
        tensors, state = {}, self.optimizer.state
        for mapping, layer in self._owned():
            for suffix in SUFFIXES:
                pair = [layer.lora_A, layer.lora_B]
                if suffix:  # before the first update there is no state
                    pair = [
                        state[one][suffix[1:]] if one in state else torch.zeros_like(one)
                        for one in pair
                    ]
                for side, tensor in zip("AB", self._whole_factors(mapping, layer, *pair) or ()):
                    tensors[f"{layer.name}.lora_{side}{suffix}"] = tensor.detach()
        write_tensors(tensors, folder)

    @torch.no_grad()
    def restore(self, folder: str, iteration: int, updates: int) -> None:
        """Resume after `iteration` iterations and `updates` optimizer steps with what `save` wrote,
        in any layout.
        """
        from torch.distributed import checkpoint

        whole = {
            f"{layer.name}.lora_{side}{suffix}": torch.empty(shape)
            for _, layer in self._adapted()
            for side, shape in zip("AB", _whole_shapes(layer))
            for suffix in SUFFIXES
        }
        checkpoint.load(whole, storage_reader=checkpoint.HuggingFaceStorageReader(folder))
        for mapping, layer in self._adapted():
            for side, parameter in (("A", layer.lora_A), ("B", layer.lora_B)):
                values = [whole[f"{layer.name}.lora_{side}{suffix}"] for suffix in SUFFIXES]
                if parameter.tensor_model_parallel:
                    values = [
                        mapping.shared.shard(value, self.tp_rank, self.tp_size) for value in values
                    ]
                parameter.copy_(values[0])
                first, second = (value.to(self.device, copy=True) for value in values[1:])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(updates)),
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }
        self.scheduler.step(iteration)


def _whole_shapes(layer: LoRALinear) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of (A, B) before any sharing."""
    return (layer.lora_A.shape[0], layer.base_layer.input_size), (
        layer.base_layer.output_size,
        layer.lora_A.shape[0],
    )
