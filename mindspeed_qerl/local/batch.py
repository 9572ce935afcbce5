"""Which questions are next; sampled answers as right-padded sequences, dealt by length to
Megatron's ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class PromptOrder:
    """Which of `count` rows are asked next: the file is shuffled anew for each pass and read in
    that order.

    With `position`, the rows asked so far, a run that resumes asks what it would have asked.

    >>> order = PromptOrder(count=4, seed=2)
    >>> order.take(3), order.position
    ([3, 2, 0], 3)
    >>> order.take(3)
    [1, 0, 2]
    """

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed
        self.position = 0

    def take(self, rows: int) -> list[int]:
        """The next `rows` row numbers; a row comes again in each pass."""
        chosen = []
        current = None
        for position in range(self.position, self.position + rows):
            number, place = divmod(position, self.count)
            if number != current:
                current = number
                order = np.random.default_rng([self.seed, number]).permutation(self.count)
            chosen.append(int(order[place]))
        self.position += rows
        return chosen


@dataclass(frozen=True)
class Batch:
    """Sequences of prompt and completion. Position t of the [N, L-1] arrays speaks of token t + 1,
    as logits do.
    """

    tokens: np.ndarray  # int64 [N, L], padded on the right with 0
    lengths: np.ndarray  # int64 [N], prompt and completion together
    mask: np.ndarray  # bool [N, L-1], True where a completion token is predicted
    # float32 [N, L-1], by the policy that sampled, noise included; 0 outside the mask
    rollout_logprobs: np.ndarray
    advantages: np.ndarray  # float32 [N]
    # float32 [N, L-1] before this step's first update; None: the ratio is 1
    old_logprobs: np.ndarray | None = None
    # float32 [N, L-1] of the base model; None: no KL term
    reference_logprobs: np.ndarray | None = None
    # [N, L-1, layers, top_k] of the token at t, for all tokens but the last of each row; None: the
    # trainer's own
    routes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, index: np.ndarray) -> "Batch":
        """The rows `index`, trimmed to the longest of them."""
        longest = int(self.lengths[index].max())
        parts = {}
        for name, value in vars(self).items():
            if value is not None:
                part = value[index]
                width = longest if name == "tokens" else longest - 1
                parts[name] = part if part.ndim == 1 else part[:, :width]
        return Batch(**parts)

    def routes_by_position(self, length: int) -> tuple[np.ndarray | None, np.ndarray]:
        """Padded to `length`, in Megatron's order, position by position: `routes` [length N,
        layers, top_k], if there are some, and which of these tokens have some, bool [length N].
        """
        known = (np.arange(length)[:, None] < self.lengths - 1).flatten()
        if self.routes is None:
            return None, known
        routes = self.routes.swapaxes(0, 1)
        routes = np.pad(routes, [(0, length - len(routes)), (0, 0), (0, 0), (0, 0)])
        return routes.reshape(-1, *routes.shape[2:]), known

    def padded(self, count: int) -> "Batch":
        """With `count` more rows that have no token to train: copies of the first one, so that
        ranks share equally.
        """
        if not count:
            return self
        batch = self.rows(np.r_[np.arange(len(self)), np.zeros(count, dtype=np.int64)])
        batch.mask[len(self) :] = False
        return batch


def build_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    advantages: np.ndarray | None = None,
    routes: Sequence[np.ndarray] | None = None,
) -> Batch:
    """One row per completion; `prompts[i]` is the prompt of `completions[i]`, `logprobs[i]` the log
    probabilities of its tokens, `routes[i]` [length - 1, layers, top_k] the experts that its tokens
    went to, prompt included. advantages: None, zeros.
    """
    starts = np.array([len(prompt) for prompt in prompts])
    lengths = starts + [len(completion) for completion in completions]
    position = np.arange(lengths.max())
    known = position < lengths[:, None]
    tokens = np.zeros(known.shape, dtype=np.int64)
    tokens[known] = np.concatenate([[*p, *c] for p, c in zip(prompts, completions)])
    followed = known[:, 1:]
    mask = followed & (position[1:] >= starts[:, None])
    rollout_logprobs = np.zeros(mask.shape, dtype=np.float32)
    rollout_logprobs[mask] = np.concatenate(logprobs)
    if advantages is None:
        advantages = np.zeros(len(tokens))
    replayed = None
    if routes is not None:
        replayed = np.zeros((*mask.shape, *routes[0].shape[1:]), dtype=routes[0].dtype)
        replayed[followed] = np.concatenate(routes)
    advantages = np.asarray(advantages, dtype=np.float32)
    return Batch(tokens, lengths, mask, rollout_logprobs, advantages, routes=replayed)


def deal(lengths: np.ndarray, size: int, ranks: int) -> list[list[np.ndarray]]:
    """Row indices [rank][mini-batch]: of each `size` rows in turn, those of each data-parallel
    rank: sorted by length and dealt in turn, so that micro-batches match.

    >>> deal(np.array([5, 7, 6, 4]), size=2, ranks=2)
    [[array([1]), array([2])], [array([0]), array([3])]]
    """
    shares: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), size):
        order = start + np.argsort(-lengths[start : start + size], kind="stable")
        for rank, share in enumerate(shares):
            share.append(order[rank::ranks])
    return shares
