"""Our loss on upstream's log-probs and entropy, in float32, on ranks that share vocabulary and
answers; test_loss.py compares what it writes.

    python loss_ranks.py TP DP MICRO_BATCH FILE

FILE gets, for each of `OPTIONS` and each rank: the loss that Megatron's schedule and gradient
reduction make of it, its gradient by the rank's logits, and the metrics.
"""

import math
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ANSWERS, PROMPT, LENGTH, VOCABULARY = 12, 4, 9, 16
CLIP = dict(clip_higher_enable=True, clip_ratio_low=0.2, clip_ratio_high=0.28, kl_coefficient=0.1)
OPTIONS = [
    (dict(CLIP), {}),
    (dict(CLIP, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_c=3.0), {}),
    (dict(CLIP, loss_mode="cispo"), dict(method="token_tis", cap=1.5)),
    (
        dict(
            CLIP,
            loss_agg_mode="seq-mean-token-sum-norm",
            loss_scale_factor=7.0,
            entropy_coefficient=0.2,
        ),
        dict(method="icepop"),
    ),
    (dict(CLIP, loss_agg_mode="seq-mean-token-sum", kl_penalty="mse"), dict(method="sequence_tis")),
    (dict(CLIP, kl_penalty="kl"), dict(method="geometric_mask", floor=0.9, cap=1.1)),
    (dict(CLIP, loss_mode="sapo", tau_neg=1.3), dict(method="sequence_mask")),
]


def make_batch() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [answers, PROMPT + LENGTH, vocabulary] and what upstream's update has beside them; two
    answers are not trained.
    """
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = torch.randint(VOCABULARY, (ANSWERS, PROMPT + LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (ANSWERS, 1), generator=generator)
    logits = normal(ANSWERS, PROMPT + LENGTH, VOCABULARY)
    old = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[:, PROMPT - 1 :, 0]
    return logits, {
        "labels": torch.cat([tokens[:, 1:], torch.zeros(ANSWERS, 1, dtype=torch.long)], 1),
        "responses": tokens[:, PROMPT:],
        "prompt_length": torch.full((ANSWERS, 1), PROMPT),
        "response_length": lengths,
        "trained": torch.tensor(
            [[0 if answer in (2, 7) else 1, 9, 9] for answer in range(ANSWERS)]
        ),
        "advantages": normal(ANSWERS, 1).expand(ANSWERS, LENGTH),
        "old_log_prob": old + 0.3 * normal(*old.shape),
        "ref_log_prob": old + 0.3 * normal(*old.shape),
        "rollout_log_prob": old + 0.3 * normal(*old.shape),
    }


class NoCopies(TorchFunctionMode):
    """The host is not handed whole tensors inside: it would wait for the device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)
        return function(*args, **kwargs or {})


def run_rank(rank: int, tp: int, dp: int, micro_batch: int, file: str) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from mindspeed_rl.utils import compute

    from mindspeed_qerl.ascend import loss as our_loss
    from mindspeed_qerl.ascend.loss import QeRLLoss
    from mindspeed_qerl.recipe.types import Algorithm, Correction

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}.rendezvous", rank=rank, world_size=tp * dp
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    compute.set_parallel_state(parallel_state)
    compute.set_vocab_parallel(tensor_parallel.vocab_parallel_cross_entropy)
    logits, batch = make_batch()
    mine = slice(
        parallel_state.get_data_parallel_rank() * ANSWERS // dp,
        (parallel_state.get_data_parallel_rank() + 1) * ANSWERS // dp,
    )
    shard = logits[mine].chunk(tp, -1)[parallel_state.get_tensor_model_parallel_rank()].contiguous()
    batch = {name: column[mine] for name, column in batch.items()}
    results = []
    our_loss.BLOCK = 5  # an entropy that is only logged takes several
    upstream_entropy = our_loss.logprob_computer.vocab_parallel_entropy
    for algorithm, correction in OPTIONS:
        our_loss.logprob_computer.vocab_parallel_entropy = upstream_entropy
        recipe = SimpleNamespace(
            algorithm=Algorithm(**algorithm), correction=Correction(**correction)
        )
        our_loss.install(recipe)
        loss, leaf, total = QeRLLoss(), shard.clone().requires_grad_(), 0.0
        loss.start(batch)
        parts = list(
            zip(leaf.split(micro_batch), *(column.split(micro_batch) for column in batch.values()))
        )
        sizes = {"actual_micro_batch_size": len(shard) / len(parts)}
        for output, *columns in parts:
            with NoCopies():
                value, _ = loss.compute_loss(output * 1.0, dict(zip(batch, columns)), **sizes)
            value = value / len(parts)  # megatron/core/pipeline_parallel/schedules.py
            value.backward()
            total += value.item()
        of_ranks = [None] * (tp * dp)
        dist.all_gather_object(
            of_ranks, (total / dp, leaf.grad / dp, loss.take_metrics())
        )  # the mean over dp
        results.append(of_ranks)
        loss.finish()
        spoilt = leaf.detach().clone()
        spoilt[0] = math.nan
        loss.compute_loss(spoilt, batch, actual_micro_batch_size=len(shard))
        try:
            loss.finish()
            raise AssertionError("an impossible log probability went unnoticed")
        except RuntimeError as error:
            assert "the trained model gave a log probability that is no number" in str(error)
    if rank == 0:
        torch.save(results, file)
    # without it gloo's threads may outlive the interpreter, which then aborts
    dist.destroy_process_group()


if __name__ == "__main__":
    import mindspeed_qerl.ascend.loss  # noqa: F401  before the ranks are forked

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    *sizes, target = sys.argv[1:]
    torch.multiprocessing.start_processes(
        run_rank, (*map(int, sizes), target), int(sizes[0]) * int(sizes[1]), start_method="fork"
    )
