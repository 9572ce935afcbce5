"""Random sequences in a paged cache, and their attention as a dense masked softmax over each
sequence as it was before paging, in numpy float64. Slots of the cache that belong to no token hold
NaN, so that reading one is seen.

Tolerances: float64 results agree to 1e-10. Anything else is computed in float32 and rounded once,
in bfloat16 by at most 2^-8 of a number, in float16 2^-11 (and 1%). float32 itself: scale * |q| |k|
sums to at most 50 here, so a score is off by some 2^-24 * 50, a weight by as much of itself and a
sum of values by a few times that: 2e-5.
"""

import numpy as np
import torch

from tests.emulation.test_operators import EXACT, normal, wide
from tests.emulation.test_operators import attention as of_batch

TOLERANCES = {
    torch.float64: EXACT,
    torch.float32: dict(rtol=0, atol=2e-5),
    torch.bfloat16: dict(rtol=2**-8 * 1.01, atol=2e-5),
    torch.float16: dict(rtol=2**-11 * 1.01, atol=2e-5),
}
HEADS, KV_HEADS, SCALE = 4, 2, 0.3


def attention(q, k, v, added=0.0):
    """(S, N, D) float64 arrays; added (S1, S2) to the scores."""
    out, _ = of_batch(*(x.swapaxes(0, 1)[None] for x in (q, k, v)), SCALE, added)
    return out[0].swapaxes(0, 1)


def causal(queries, keys):
    """-inf where one of the last queries of a sequence does not see a key."""
    return np.where(np.arange(keys) > np.arange(queries)[:, None] + keys - queries, -np.inf, 0.0)


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class Paged:
    """Sequences of random queries, keys and values, and their cache: blocks in random order, table
    rows too wide.
    """

    def __init__(self, queries, keys, block_size, dtype=torch.float64, sizes=(16, 16), padding=2):
        random = np.random.default_rng(0)
        self.queries, self.keys = queries, keys
        self.query = normal(sum(queries) + padding, HEADS, sizes[0], dtype=dtype)
        needed = [-(-length // block_size) for length in keys]
        free = iter(random.permutation(sum(needed) + 3).tolist())
        table = np.full((len(keys), max(needed) + 2), -1)
        shapes = [(sum(needed) + 3, block_size, KV_HEADS, size) for size in sizes]
        self.key_cache, self.value_cache = (
            torch.full(shape, torch.nan, dtype=dtype) for shape in shapes
        )
        self.sequences = []
        for s, length in enumerate(keys):
            k, v = (
                normal(length, KV_HEADS, size, dtype=dtype, seed=7 * s + i)
                for i, size in enumerate(sizes)
            )
            for token in range(length):
                if token % block_size == 0:
                    table[s, token // block_size] = next(free)
                block = table[s, token // block_size]
                self.key_cache[block, token % block_size] = k[token]
                self.value_cache[block, token % block_size] = v[token]
            self.sequences.append((wide(k), wide(v)))
        self.table = int32(table)
        self.out = torch.full((*self.query.shape[:2], sizes[1]), 5.0, dtype=dtype)

    def expected(self, added=causal):
        """Rows that no sequence has keep what out held; added(queries, keys) or one array for each
        sequence.
        """
        rows, start = np.full(self.out.shape, 5.0), 0
        for s, (count, (k, v)) in enumerate(zip(self.queries, self.sequences, strict=True)):
            if count:
                one = added(count, len(k)) if callable(added) else added[s]
                rows[start : start + count] = attention(
                    wide(self.query[start : start + count]), k, v, one
                )
            start += count
        return rows

    def check(self, added=causal):
        np.testing.assert_allclose(
            wide(self.out), self.expected(added), **TOLERANCES[self.out.dtype]
        )
