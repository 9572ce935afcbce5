"""Which questions are next; and from sampled answers to what a Megatron rank is fed: right-padded sequences, dealt out by length."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


class PromptOrder:
    """Which rows are asked next: the file is shuffled anew for each pass and read in that order.

    Args:
        count: rows of the file. seed: of the shuffles.

    Attributes:
        position: rows asked so far. With it a run that resumes asks what it would have asked.

    >>> order = PromptOrder(count=4, seed=2)
    >>> order.take(3), order.position
    ([3, 2, 0], 3)
    >>> order.take(3)
    [1, 0, 2]
    """

    def __init__(self, count: int, seed: int):
        self.count, self.seed, self.position = count, seed, 0

    def take(self, rows: int) -> list[int]:
        """The next `rows` row numbers; a row comes again in each pass."""
        positions = range(self.position, self.position + rows)
        passes = {position // self.count for position in positions}
        shuffled = {number: np.random.default_rng([self.seed, number]).permutation(self.count) for number in passes}
        self.position += rows
        return [int(shuffled[position // self.count][position % self.count]) for position in positions]


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt and completion. Position t of the [N, L-1] arrays speaks of token t + 1, as logits do.

    Attributes:
        tokens: int64 [N, L], padded on the right with 0.
        lengths: int64 [N], prompt and completion together.
        mask: bool [N, L-1], True where a completion token is predicted.
        rollout_logprobs: float32 [N, L-1], by the policy that sampled, noise included; 0 outside the mask.
        advantages: float32 [N].
        old_logprobs: float32 [N, L-1] before the first update of this step, or None: the ratio then starts at 1.
        reference_logprobs: float32 [N, L-1] of the base model, or None: no KL term.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: np.ndarray) -> "Batch":
        """The rows `index`, trimmed to the longest of them."""
        longest = int(self.lengths[index].max())
        parts = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[index]
                if value.ndim == 2:
                    value = value[:, : longest if field.name == "tokens" else longest - 1]
            parts[field.name] = value
        return Batch(**parts)


def build_batch(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]],
                advantages: np.ndarray) -> Batch:
    """One row per completion; `prompts[i]` is the prompt of `completions[i]`, `logprobs[i]` the log probabilities of its tokens."""
    lengths = np.array([len(p) + len(c) for p, c in zip(prompts, completions)], dtype=np.int64)
    count, longest = len(lengths), int(lengths.max())
    tokens = np.zeros((count, longest), dtype=np.int64)
    mask = np.zeros((count, longest - 1), dtype=bool)
    rollout_logprobs = np.zeros((count, longest - 1), dtype=np.float32)
    for row, (prompt, completion, logprob) in enumerate(zip(prompts, completions, logprobs)):
        tokens[row, : lengths[row]] = [*prompt, *completion]
        predicted = slice(len(prompt) - 1, lengths[row] - 1)
        mask[row, predicted] = True
        rollout_logprobs[row, predicted] = logprob
    return Batch(tokens, lengths, mask, rollout_logprobs, np.asarray(advantages, dtype=np.float32))


def deal(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Row indices for each data-parallel rank: sorted by length and dealt in turn, so that micro-batches pad little and match.

    Raises:
        ValueError: the rows cannot be shared equally (ranks that wait for each other in the experts must run equally often).
    """
    if len(lengths) % ranks:
        raise ValueError(f"{len(lengths)} sequences cannot be dealt equally to {ranks} data-parallel ranks")
    order = np.argsort(-lengths, kind="stable")
    return [order[rank::ranks] for rank in range(ranks)]
