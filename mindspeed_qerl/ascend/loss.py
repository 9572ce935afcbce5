"""Our loss where upstream's trainer looks its own up, and over the whole mini-batch.

Upstream's loss of `ray_grpo` reads clip_ratio, kl_penalty, entropy_coeff and the KL coefficient,
and takes the mean of each micro-batch (models/loss/grpo_actor_loss_func.py). Here
algorithm/losses.py gives a sum, which is divided by what all ranks' micro-batches of the mini-batch
have together.
"""

import torch
from mindspeed_rl.models import actor_rollout_hybrid
from mindspeed_rl.models.actor import Actor
from mindspeed_rl.models.loss import logprob_computer
from mindspeed_rl.models.loss.base_loss_func import BaseLossFunc
from mindspeed_rl.models.loss.loss_func_factory import LossFuncFactory
from mindspeed_rl.utils.compute import get_parallel_state, vocab_parallel_entropy
from torch import Tensor

from mindspeed_qerl.algorithm.losses import LossInputs, denominator, loss
from mindspeed_qerl.algorithm.metrics import Mean, Metrics, merge, on_host
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.runs.checks import impossible

from .merging import forget_merged, merge_adapters
from .routing import RoutedPasses

BLOCK = 1024  # tokens: of 152,000 logits each, in float32, 0.6 GB a copy
# of the transfer dock, besides those that upstream's update asks for
COLUMNS = ("rollout_log_prob", "trained")


def trained_tokens(batch: dict[str, Tensor]) -> Tensor:
    """Which tokens are trained, bool, of the shape of `responses` [answers, length]: those of an
    answer, unless its column `trained` [answers, any] is 0 (it was cut off, or fills up the batch).
    """
    place = torch.arange(batch["responses"].shape[1], device=batch["responses"].device)
    return (place < batch["response_length"]) & (batch["trained"][:, :1] > 0)


@torch.no_grad()
def entropy_in_blocks(logits: Tensor) -> Tensor:
    """Computes upstream's entropy [batch, length] of logits [batch, length, part of vocabulary],
    BLOCK tokens at a time, since it makes three copies of what it gets.
    """
    blocks = [vocab_parallel_entropy(block) for block in logits.flatten(0, 1).split(BLOCK)]
    return torch.cat(blocks).view(logits.shape[:2])


class QeRLLoss(BaseLossFunc):
    """algorithm/losses.py as one of upstream's losses.

    Attributes:
        recipe: the run's, by `install`. divisor, answers: of the mini-batch under way, over all
            ranks and on this one. is_impossible: whether a log probability of its micro-batches so
            far is, on the device. parts: the metrics of each micro-batch since `take_metrics`.
    """

    recipe: Recipe

    def __init__(self):
        super().__init__()
        self.divisor = 0.0
        self.answers = 0
        self.parts = []
        self.is_impossible = False

    def start(self, mini_batch: dict[str, Tensor]) -> None:
        """Sets what the losses of `mini_batch` are divided by; call it before its micro-batches."""
        mask = trained_tokens(mini_batch)
        divisor = denominator(mask, self.recipe.algorithm).float()
        torch.distributed.all_reduce(divisor, group=get_parallel_state().get_data_parallel_group())
        self.divisor = divisor.item()
        self.answers = len(mask)

    def finish(self) -> None:
        """After the micro-batches: RuntimeError if a log probability of one was impossible. The
        host waits for the device once in a mini-batch, not in each micro-batch.
        """
        is_impossible = self.is_impossible
        self.is_impossible = False
        if is_impossible:
            raise RuntimeError(
                "the trained model gave a log probability that is no number, or above 0: nothing "
                "can be trained on it. Lower actor_config.lr, and look at loss/* in metrics.jsonl"
            )

    def compute_loss(self, output, batch, forward_only=False, non_loss_data=True, **kwargs):
        """Log-probs with `forward_only`; else what Megatron's schedule is to send back, and no
        metrics: upstream would take the mean of micro-batches of different lengths.

        The schedule divides by the number of micro-batches, and the gradient is the mean over the
        data-parallel ranks (megatron/core/pipeline_parallel/schedules.py,
        distributed_data_parallel.py): both are undone here.
        """
        if forward_only:
            return self.compute_log_probs(output=output, batch=batch, **kwargs)[0]
        algorithm = self.recipe.algorithm
        logprobs, entropy = self.compute_log_probs(
            output=output, batch=batch, skip_entropy=False, **kwargs
        )
        mask = trained_tokens(batch)
        before = logprobs.detach()
        self.is_impossible |= (impossible(before) & mask).any()
        inputs = LossInputs(
            logprobs,
            batch.get("old_log_prob", before),
            batch["rollout_log_prob"],
            batch["advantages"][:, 0],
            mask,
            batch.get("ref_log_prob"),
            entropy,
        )
        total, metrics = loss(inputs, algorithm, self.recipe.correction)
        self.parts.append(metrics)
        if not self.divisor:
            return total * 0.0, {}
        micro_batches = self.answers / kwargs["actual_micro_batch_size"]
        scale = micro_batches * get_parallel_state().get_data_parallel_world_size() / self.divisor
        trained = total * scale
        # logged is what is trained
        logged = trained.detach().double() / scale
        metrics["loss/total"] = Mean(logged, denominator(mask, algorithm))
        return trained, {}

    def take_metrics(self) -> Metrics:
        """Returns the metrics of this rank's micro-batches since the last call, on the host."""
        parts = self.parts
        self.parts = []
        return on_host(merge(parts))


class QeRLActor(Actor):
    """The training engine of upstream; a mini-batch without a token to train is no update, and
    routes are replayed.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        recipe = self.loss_func.recipe
        self.routes = None
        if recipe.algorithm.routing_replay != "none":
            self.routes = RoutedPasses(self.model[0], recipe)
            self.forward_backward_func = self.routes.around(self.forward_backward_func)
        step = self.optimizer.step

        def step_if_trained() -> tuple[bool, float, int]:
            forget_merged(self.model)
            if self.loss_func.divisor:
                return step()
            # AdamW's moments before its first update, which a checkpoint must have
            # (distrib_optimizer.py:1007)
            for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                part.init_state_fn(part.optimizer, part.config)
            return True, 0.0, 0

        self.optimizer.step = step_if_trained

    def _forward_backward_batch(self, batch, forward_only=False):
        merge_adapters(self.model)
        if not forward_only:
            self.loss_func.start(batch)
        try:
            return super()._forward_backward_batch(batch, forward_only)
        finally:  # Megatron may have stopped at the gradient of the same fault, without the answer
            self.loss_func.finish()


def install(recipe: Recipe) -> None:
    """Put both where upstream's worker of this process looks its own up; and the entropy, where it
    is logged and not trained.
    """
    QeRLLoss.recipe = recipe
    if not recipe.algorithm.entropy_coefficient:
        logprob_computer.vocab_parallel_entropy = entropy_in_blocks
    LossFuncFactory.register_loss("ray_grpo", "actor")(QeRLLoss)
    actor_rollout_hybrid.Actor = QeRLActor
