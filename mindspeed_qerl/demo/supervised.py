"""Supervised training of a Hugging Face model on answers, the prompts' tokens left out: what the
models of the quickstart and the studies begin with.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

Batch = tuple[torch.Tensor, torch.Tensor]  # input_ids and labels, int64 [batch, longest]


def padded(prompts: Sequence[list[int]], completions: Sequence[list[int]], pad: int) -> Batch:
    """Right-padded; labels are -100 on the prompt and on the padding.

    No attention mask is needed: attention is causal, so no real token sees the padding after it.

    >>> padded([[1, 2], [3]], [[4], [5]], pad=0)
    (tensor([[1, 2, 4],
            [3, 5, 0]]), tensor([[-100, -100,    4],
            [-100,    5, -100]]))
    """
    rows = [torch.tensor(prompt + completion) for prompt, completion in zip(prompts, completions)]
    labels = [
        torch.tensor([-100] * len(prompt) + completion)
        for prompt, completion in zip(prompts, completions)
    ]
    return pad_sequence(rows, True, pad), pad_sequence(labels, True, -100)


def fit(
    model, batches: Iterable[Batch], steps: int, learning_rate: float, bfloat16: bool = False
) -> list[float]:
    """Train every weight of `model` in place with AdamW on `batches`, one a step.

    The rate is constant, then falls to 0 over the last fifth: at a constant rate the share of each
    kind of answer sways by a third from step to step. A longer decay leaves the arithmetic half
    learned. With `bfloat16` the products are in it; the weights stay in their dtype.

    Returns:
        The loss of every step, nats per labelled token.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    losses = []
    model.train()
    for step, (input_ids, labels) in zip(range(steps), batches):
        optimizer.param_groups[0]["lr"] = learning_rate * min(1.0, 5 * (1 - step / steps))
        # Around one forward pass: as long as it lasts, autocast keeps the weights that it has
        # rounded.
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if done * 10 // steps > step * 10 // steps:  # ten lines
            print(f"supervised training | step {done}/{steps} | loss {losses[-1]:.3f}", flush=True)
    model.eval()
    return losses
