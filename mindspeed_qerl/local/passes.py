"""Passes of one rank's part of the model over the micro-batches of a shard, by megatron-core's 1F1B
schedule (with one pipeline stage: forward, backward, forward, ...).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mindspeed_qerl.algorithm.losses import (
    LossInputs,
    denominator,
    loss,
    token_entropy,
    token_logprobs,
)
from mindspeed_qerl.algorithm.metrics import Mean, Metrics
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.replay import MicroBatch, RouteReplay
from mindspeed_qerl.runs.checks import logprobs_fault

from .batch import TrainBatch
from .place import Place


@dataclass
class Passes:
    """Forward passes, with and without backward passes. Only the last pipeline stage has results.

    Args:
        replay: puts a shard's routes into the routers; None: there are none.
        skip_prompts: of the model's last layer, if it may leave out what precedes the answers.
    """

    model: nn.Module
    recipe: Recipe
    place: Place
    replay: RouteReplay | None
    skip_prompts: nn.Module | None

    @torch.no_grad()
    def logprobs(self, shard: TrainBatch, size: int) -> np.ndarray:
        """Log probabilities of the tokens, float32 [N, L-1]; zeros but on the last pipeline stage.
        size: answers in a micro-batch.
        """
        return self._assembled(shard, size, self._run(shard, size))

    def train(self, shard: TrainBatch, divisor: float) -> list[Metrics]:
        """Add to the parameters' gradients; returns the metrics of each micro-batch, with tensors
        of the device in them. RuntimeError where a log probability is none. divisor: of the loss,
        for the whole mini-batch.
        """
        size = self.recipe.batch.micro_batch_size
        results = self._run(shard, size, divisor)
        self._assembled(shard, size, [logprobs for _, logprobs in results])
        return [metrics for metrics, _ in results]

    def _run(self, shard: TrainBatch, size: int, divisor: float | None = None) -> list:
        """Yields what `_logprobs` gives of each micro-batch, or with a divisor `_trained`."""
        from megatron.core.pipeline_parallel import schedules

        rows = np.arange(len(shard))
        micros = [shard.rows(rows[start : start + size]) for start in range(0, len(shard), size)]
        return schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=partial(self._forward, divisor),
            data_iterator=iter(micros),
            model=self.model,
            num_microbatches=len(micros),
            seq_length=shard.tokens.shape[1],
            micro_batch_size=size,
            forward_only=divisor is None,
            collect_non_loss_data=divisor is None,
        )

    def _forward(
        self, divisor: float | None, micros: Iterator[TrainBatch], model: nn.Module
    ) -> tuple[Tensor, Any]:
        """A forward step of the schedule, with the micro-batch's routes, if it has some: the output
        of this stage, and what makes a result of it, if it is the last one.
        """
        micro = next(micros)
        length = micro.tokens.shape[1]
        first = 0
        if self.skip_prompts:
            if divisor is not None:
                first = int(micro.mask.any(0).argmax())
            self.skip_prompts.first = first
        padding = -length % self.place.tp_size  # tensor parallel ranks share the sequence
        tokens = pad(self._tensor(micro.tokens), (0, padding))
        replaying: AbstractContextManager = nullcontext()
        if micro.routes is not None:
            assert self.replay, "without it there are no routes"
            routes, known = micro.routes_by_position(tokens.shape[1])
            replaying = self.replay.forward(MicroBatch(self._tensor(routes), self._tensor(known)))
        with replaying:
            output = model(tokens, None, None)  # rotary positions count by themselves
        tokens = tokens[:, first + 1 : length]
        if divisor is None:
            return output, partial(self._logprobs, tokens)
        return output, partial(self._trained, micro, tokens, first, divisor)

    def _logits(self, output: Tensor, length: int) -> Tensor:
        """Returns logits of the whole vocabulary, [n, length, vocabulary]."""
        from megatron.core import tensor_parallel

        return tensor_parallel.gather_from_tensor_model_parallel_region(output)[:, :length]

    def _logprobs(self, tokens: Tensor, output: Tensor, non_loss_data: bool = True) -> Tensor:
        """float32 [n, l - 1]; the signature is megatron-core's."""
        logits = self._logits(output, tokens.shape[1])
        return token_logprobs(logits, tokens, self.recipe.sampling.temperature)

    def _trained(
        self, micro: TrainBatch, tokens: Tensor, first: int, divisor: float, output: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Metrics, Tensor]]:
        """(loss for `backward`, number of tokens that nothing is divided by, the result: metrics
        and float32 [n, l - 1], on the device, since a copy to the host would wait for it).
        """
        algorithm = self.recipe.algorithm
        temperature = self.recipe.sampling.temperature
        logits = self._logits(output, tokens.shape[1])
        logprobs = pad(token_logprobs(logits, tokens, temperature), (first, 0))
        before = logprobs.detach()
        with torch.set_grad_enabled(algorithm.entropy_coefficient > 0):
            entropy = pad(token_entropy(logits, temperature), (first, 0))
        old = self._tensor(micro.old_logprobs)
        inputs = LossInputs(
            logprobs,
            before if old is None else old,
            self._tensor(micro.rollout_logprobs),
            self._tensor(micro.advantages),
            self._tensor(micro.mask),
            self._tensor(micro.reference_logprobs),
            entropy,
        )
        total, metrics = loss(inputs, algorithm, self.recipe.correction)
        trained = total / divisor
        # what is logged is what is trained
        logged = trained.detach().double() * divisor
        metrics["loss/total"] = Mean(logged, denominator(inputs.mask, algorithm))
        count = torch.zeros((), dtype=torch.int, device=trained.device)
        return trained, count, (metrics, before)

    def _assembled(self, shard: TrainBatch, size: int, parts: Sequence[Tensor]) -> np.ndarray:
        """The log probabilities of micro-batches as those of their shard, on the host; RuntimeError
        that names the answer where one of a token to train is none.
        """
        whole = np.zeros(shard.mask.shape, dtype=np.float32)
        for start, part in zip(range(0, len(shard), size), parts):
            whole[start : start + size, : part.shape[1]] = part.cpu().numpy()
        if fault := logprobs_fault(whole, shard.mask, shard.tokens[:, 1:]):
            raise RuntimeError(fault)
        return whole

    def _tensor(self, array: np.ndarray | None) -> Any:
        """On the device; None: there is none."""
        return None if array is None else torch.from_numpy(array).to(self.place.device)
