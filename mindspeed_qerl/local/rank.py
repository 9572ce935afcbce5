"""One Megatron rank: the policy with its adapters, its optimizer, and the weights it owes to the rollout engine."""

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_qerl.local.batch import Batch
from mindspeed_qerl.local.grpo import grpo_loss, low_variance_kl, token_logprobs
from mindspeed_qerl.local.settings import RunConfig
from mindspeed_qerl.lora import adapters_disabled, apply_lora, lora_layers


class TrainRank:
    """A rank of the training world. Ranks move in step: every method is called on all of them at once, with shards of equal size."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, rendezvous: str):
        """rendezvous: init_method of torch.distributed, for example file:///some/new/file."""
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="lo")
        from mindspeed_qerl.emulation import cuda_on_cpu

        cuda_on_cpu.install()
        from megatron.core import parallel_state
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        from mindspeed_qerl.local.model import DTYPES, build_model

        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=config.expert_parallel)
        self.config = config
        self.data_group = parallel_state.get_data_parallel_group()
        self.expert_data_group = parallel_state.get_expert_data_parallel_group()
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.owns_dense = parallel_state.get_data_parallel_rank() == 0
        self.owns_experts = parallel_state.get_expert_data_parallel_rank() == 0
        self.model, table, experts = build_model(config.model_dir, DTYPES[config.dtype])
        self.table = {mapping.megatron: mapping for mapping in table}
        apply_lora(self.model, config.lora_targets, config.lora_r, config.lora_alpha, config.seed, experts.start)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, betas=config.adam_betas, weight_decay=config.weight_decay)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=config.lr, min_lr=config.min_lr, lr_warmup_steps=config.lr_warmup_steps,
            lr_decay_steps=config.train_iters, lr_decay_style=config.lr_decay_style, start_wd=config.weight_decay,
            end_wd=config.weight_decay, wd_incr_steps=config.train_iters, wd_incr_style="constant")

    def describe(self) -> dict[str, dict[str, int]]:
        """Per LoRA target its modules and parameters; a layer that several ranks hold is counted by the one that answers for it."""
        counted = {}
        for name, layer in lora_layers(self.model):
            target = name.rpartition(".")[2]
            owned = self.owns_experts if "local_experts" in name else self.owns_dense
            entry = counted.setdefault(target, {"modules": 0, "parameters": 0})
            if owned:
                entry["modules"] += 1
                entry["parameters"] += layer.lora_A.numel() + layer.lora_B.numel()
        return counted

    def _micro_batches(self, shard: Batch) -> Iterator[tuple[np.ndarray, Batch]]:
        size = self.config.micro_batch_size
        for start in range(0, len(shard), size):
            index = np.arange(start, min(start + size, len(shard)))
            yield index, shard.rows(index)

    def _forward(self, micro: Batch) -> torch.Tensor:
        """float32 [n, l-1]: log probability of each next token."""
        tokens = torch.from_numpy(micro.tokens)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = self.model(tokens, positions, None)
        return token_logprobs(logits[:, :-1], tokens[:, 1:], self.config.sampling.temperature)

    @torch.no_grad()
    def logprobs(self, shard: Batch, reference: bool = False) -> np.ndarray:
        """float32 [N, L-1] by the policy, or by the base model (adapters off, experts included) with `reference`."""
        result = np.zeros(shard.mask.shape, dtype=np.float32)
        with adapters_disabled(self.model) if reference else contextlib.nullcontext():
            for index, micro in self._micro_batches(shard):
                values = self._forward(micro).numpy()
                result[index, : values.shape[1]] = values
        return result

    def train(self, shards: list[Batch], epochs: int = 1) -> dict[str, float]:
        """One iteration: `epochs` passes over the mini-batches, one optimizer step for each.

        Args:
            shards: this rank's part of each mini-batch.

        Returns:
            the iteration's metrics, the same on every rank, besides time/logprobs and time/update in seconds.
        """
        started = time.perf_counter()
        if self.config.kl_coefficient > 0:
            shards = [replace(shard, reference_logprobs=self.logprobs(shard, reference=True)) for shard in shards]
        if len(shards) * epochs > 1:  # with a single update the policy that is trained is the policy before it
            shards = [replace(shard, old_logprobs=self.logprobs(shard)) for shard in shards]
        forward_seconds = time.perf_counter() - started
        metrics = self._update(shards * epochs)
        seconds = time.perf_counter() - started
        return {**metrics, "time/logprobs": forward_seconds, "time/update": seconds - forward_seconds}

    def _update(self, shards: list[Batch]) -> dict[str, float]:
        totals = torch.zeros(7, dtype=torch.float64)
        largest = torch.zeros(1, dtype=torch.float64)
        grad_norms = []
        for shard in shards:
            tokens = torch.tensor(float(shard.mask.sum()))
            dist.all_reduce(tokens, group=self.data_group)
            self.optimizer.zero_grad(set_to_none=False)
            for _, micro in self._micro_batches(shard):
                totals += self._backward(micro, float(tokens), largest)
            grad_norms.append(self._reduce_and_clip())
            self.optimizer.step()
        lr = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(1)
        dist.all_reduce(totals, group=self.data_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.data_group)
        policy, kl, clipped, count, k1, k3, difference = totals.tolist()
        return {
            "loss/policy": policy / count,
            "loss/kl": kl / count,
            "loss/total": (policy + self.config.kl_coefficient * kl) / count,
            "clip_fraction": clipped / count,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "lr": lr,
            "mismatch/k1": k1 / count,
            "mismatch/k3": k3 / count,
            "mismatch/mean_abs_prob_diff": difference / count,
            "mismatch/max_abs_prob_diff": largest.item(),
        }

    def _backward(self, micro: Batch, mini_batch_tokens: float, largest: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradients of one micro-batch; returns its sums (policy, kl, clipped, tokens, k1, k3, |dp|)."""
        logprobs = self._forward(micro)
        mask = torch.from_numpy(micro.mask)
        old = logprobs.detach() if micro.old_logprobs is None else torch.from_numpy(micro.old_logprobs)
        reference = None if micro.reference_logprobs is None else torch.from_numpy(micro.reference_logprobs)
        terms = grpo_loss(logprobs, old, torch.from_numpy(micro.advantages), mask, self.config.clip_low, self.config.clip_high,
                          reference)
        ((terms.policy + self.config.kl_coefficient * terms.kl) / mini_batch_tokens).backward()
        sampled, trained = torch.from_numpy(micro.rollout_logprobs)[mask].double(), old[mask].double()
        difference = (sampled.exp() - trained.exp()).abs()
        if difference.numel():
            largest.copy_(torch.maximum(largest, difference.max().reshape(1)))
        return torch.tensor([terms.policy.item(), terms.kl.item(), terms.clipped_tokens.item(), float(mask.sum()),
                             (sampled - trained).sum().item(), low_variance_kl(sampled, trained).sum().item(),
                             difference.sum().item()], dtype=torch.float64)

    def _reduce_and_clip(self) -> float:
        """Sum gradients over the ranks that share a parameter, clip by the global norm; returns the norm before clipping.

        The loss is divided by the token count of all ranks, so a sum is right for both kinds. An expert's tokens already reach
        its rank through the dispatcher; only its replicas are summed. Each parameter enters the norm once.
        """
        squares = []
        for group, shared in ((self.data_group, True), (self.expert_data_group, False)):
            gradients = [p.grad for p in self.parameters if p.allreduce is shared]
            square = torch.zeros((), dtype=torch.float64)
            if gradients:
                flat = torch.cat([g.reshape(-1) for g in gradients])
                dist.all_reduce(flat, group=group)
                for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
                    gradient.copy_(part.view_as(gradient))
                square = flat.double().square().sum()
            squares.append(square)
        dense, experts = squares
        dist.all_reduce(experts, group=self.expert_group)
        norm = math.sqrt(dense.item() + experts.item())
        if not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}: lower actor_config.lr, and look at loss/* in metrics.jsonl")
        if self.config.clip_grad > 0 and norm > self.config.clip_grad:
            for parameter in self.parameters:
                parameter.grad.mul_(self.config.clip_grad / (norm + 1e-6))
        return norm

    def _owned_layers(self) -> Iterable:
        for name, layer in lora_layers(self.model):
            if self.owns_experts if "local_experts" in name else self.owns_dense:
                yield self.table[name + ".weight"], layer

    def merged_weights(self) -> dict[str, np.ndarray]:
        """HF name -> W + (alpha / r) B A, for the adapted layers this rank answers for."""
        return {name: part.contiguous().float().numpy()
                for mapping, layer in self._owned_layers()
                for name, part in zip(mapping.hf, mapping.split(layer.merged_weight()))}

    @torch.no_grad()
    def adapter_factors(self) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
        """HF name -> (target, (alpha / r) B [out, r], A [r, in]): from these the rollout engine proves what it received."""
        return {name: (mapping.megatron.split(".")[-2], (layer.scaling * b).contiguous().numpy(), layer.lora_A.numpy())
                for mapping, layer in self._owned_layers()
                for name, b in zip(mapping.hf, mapping.split(layer.lora_B))}
