"""Which questions are next; sampled answers as right-padded sequences, dealt by length to
Megatron's ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
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

    count: int
    seed: int
    position: int = 0

    def take(self, rows: int) -> list[int]:
        """The next `rows` row numbers; a row comes again in each pass."""
        first, place = divmod(self.position, self.count)
        order: list[int] = []  # of this pass, and of those that it takes to have enough
        while len(order) < place + rows:
            generator = np.random.default_rng([self.seed, first + len(order) // self.count])
            order += generator.permutation(self.count).tolist()
        self.position += rows
        return order[place : place + rows]


@dataclass
class Answer:
    """A sampled answer, from the sampler to the batch. In lists those to one prompt are side by
    side.

    Attributes:
        prompt, token_ids: of the question and of the answer, with the end token, if it was reached.
        logprobs: of `token_ids` under the policy that sampled, if they are needed.
        is_truncated: whether the limit cut it off.
        routes: [prompt + answer - 1, layers, top_k], the experts that its tokens went to, if they
            were recorded.
        question, text, expected: of the task's row, of this answer, and the right one.
        reward: of length, too. scores: of each verifier. Like the texts, once it is scored; NaN
            where they could not be computed.
    """

    prompt: Sequence[int]
    token_ids: list[int]
    logprobs: Sequence[float]
    is_truncated: bool = False
    routes: Any = field(default=None, compare=False)  # arrays are not one bool
    question: str = ""
    text: str = ""
    expected: str = ""
    reward: float = math.nan
    scores: dict[str, float] = field(default_factory=dict)


def decoded(tokenizer: Any, answers: Sequence[Answer]) -> list[str]:
    """The texts of answers, without special tokens."""
    tokens = [answer.token_ids for answer in answers]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def sampling_of(tokenizer: Any, max_tokens: int, temperature: float) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams."""
    end = tokenizer.eos_token_id
    return {
        "max_tokens": max_tokens,
        "stop_token_ids": [] if end is None else [end],
        "temperature": temperature,
    }


@dataclass(frozen=True)
class TrainBatch:
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

    def rows(self, index: np.ndarray) -> "TrainBatch":
        """The rows `index`, trimmed to the longest of them."""
        longest = int(self.lengths[index].max())
        parts = {}
        for name, value in vars(self).items():
            if value is not None:
                part = value[index]
                width = longest if name == "tokens" else longest - 1
                parts[name] = part if part.ndim == 1 else part[:, :width]
        return TrainBatch(**parts)

    def routes_by_position(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Padded to `length`, in Megatron's order, position by position: `routes` [length N,
        layers, top_k], and which of these tokens have some, bool [length N].
        """
        assert self.routes is not None, "the rollout recorded them"
        known = (np.arange(length)[:, None] < self.lengths - 1).flatten()
        routes = self.routes.swapaxes(0, 1)
        routes = np.pad(routes, [(0, length - len(routes))] + 3 * [(0, 0)])
        return routes.reshape(-1, *routes.shape[2:]), known

    def padded(self, count: int) -> "TrainBatch":
        """With `count` more rows that have no token to train: copies of the first one, so that
        ranks share equally.
        """
        batch = self.rows(np.r_[np.arange(len(self)), np.zeros(count, dtype=np.int64)])
        batch.mask[len(self) :] = False
        return batch


def build_batch(answers: Sequence[Answer]) -> TrainBatch:
    """One row for each of `answers`, with their routes, if they have some; advantages of 0."""
    starts = np.array([len(answer.prompt) for answer in answers])
    lengths = starts + [len(answer.token_ids) for answer in answers]
    position = np.arange(lengths.max())
    known = position < lengths[:, None]
    tokens = np.zeros(known.shape, dtype=np.int64)
    tokens[known] = np.concatenate([[*answer.prompt, *answer.token_ids] for answer in answers])
    followed = known[:, 1:]
    mask = followed & (position[1:] >= starts[:, None])
    rollout_logprobs = np.zeros(mask.shape, dtype=np.float32)
    rollout_logprobs[mask] = np.concatenate([answer.logprobs for answer in answers])
    replayed = None
    if answers[0].routes is not None:
        routes = np.concatenate([answer.routes for answer in answers])
        replayed = np.zeros((*mask.shape, *routes.shape[1:]), dtype=routes.dtype)
        replayed[followed] = routes
    advantages = np.zeros(len(tokens), dtype=np.float32)
    return TrainBatch(tokens, lengths, mask, rollout_logprobs, advantages, routes=replayed)


def deal(lengths: np.ndarray, size: int, ranks: int, rank: int) -> list[np.ndarray]:
    """Row indices of each mini-batch: of each `size` rows in turn, those of data-parallel rank
    `rank` of `ranks`: sorted by length and dealt in turn, so that micro-batches match.

    >>> deal(np.array([5, 7, 6, 4]), size=2, ranks=2, rank=1)
    [array([0]), array([3])]
    """
    share = []
    for start in range(0, len(lengths), size):
        order = start + np.argsort(-lengths[start : start + size], kind="stable")
        share.append(order[rank::ranks])
    return share
