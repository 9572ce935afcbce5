"""ATB's operators over a paged cache, which torch_npu calls `_npu_*`, as an explicit softmax in
float32.

A paged cache is a key and a value cache (blocks, block_size, N, D). Token i of sequence s is row i
% block_size of block block_table[s, i // block_size]; block_size * block + row is its slot.

torch_npu documents none of these functions. Their contract was read in its wrappers
(Ascend/op-plugin 7.2.0, op_plugin/ops/atb/) and in ATB (hicann/ascend-transformer-boost, branches
of CANN 8.3.RC1 and 8.5.0: dtypes in ops_configs/atb_ops_info.ini, shapes in src/ops_infer/, values
in src/kernels/mixkernels/; of pages it has one, which the first function names); what differs
between the two releases is not used here. Common to all:

- They take float16 and bfloat16, one for all tensors (the cache alone can be int8); see
  contract.ONLY_DOCUMENTED_DTYPES for float32 and float64. Indices and lengths are int32. On an NPU
  lengths must lie in host memory; all memory is host memory here, so that is not checked.
- What is written in place is contiguous and has the shape of the result.
- Scores, softmax and sums are float32; the result is rounded once.

Not emulated: _npu_paged_attention_get_workspace, which vllm-ascend calls while it captures
graphs with a torch_npu of 20250919 or later (VA utils.py:769); the emulated one says 2.7.1.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mindspeed_qerl.emulation.attention import softmax_attention
from mindspeed_qerl.emulation.contract import (
    HALF,
    require,
    require_dtype,
    require_integers,
    require_written,
)

FILLER = (
    0  # the slot of rows that fill a graph up (VA worker/model_runner_v1.py:1489): of no sequence
)
_BLOCK = 128  # the side of a compressed mask
_HIDES = -3e38  # what a bfloat16 kernel multiplies a mask with


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Write each token's key and value into its slot of the cache, in place; a token with a
    negative slot is skipped.

    Contract: op_plugin/ops/atb/ReshapeAndCachAtb.cpp; ATB
    src/kernels/document/ops/reshape_and_cache.md (slots below blocks * block_size and above its
    negative, all different) and, for what a negative slot does,
    src/kernels/mixkernels/reshape_and_cache/op_kernel/reshape_and_cache_nd.cpp, which lets negative
    ones be equal. Caller: VA attention/attention_v1.py:654.

    Args:
        key, value: (T, N, D), D of its own each; int8 too.
        key_cache, value_cache: (blocks, block_size, N, D).
        slot_indices: (T,) or longer, int32.

    Raises:
        ValueError: another dtype or shape; a slot outside the cache or two tokens for one slot
            other than 0, neither of which an NPU checks: it writes out of bounds, or one of the two.
    """
    name = "_npu_reshape_and_cache"
    require_dtype(
        name,
        (*HALF, torch.int8),
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
    )
    require_integers(name, 1, slot_indices=slot_indices)
    blocks, block_size = _cache_shape(name, key_cache, value_cache)
    for x, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        require(
            name,
            new.dim() == 3 and len(new) == len(key),
            f"{x} must be 3-D, key and value of as many tokens",
            tuple(new.shape),
        )
        require_written(name, (blocks, block_size, *new.shape[1:]), **{f"{x}_cache": cache})
    require(
        name,
        len(slot_indices) >= len(key),
        f"slot_indices must have a slot for each of {len(key)} tokens",
        len(slot_indices),
    )
    slots = slot_indices[: len(key)].long()
    outside = slots[slots.abs() >= blocks * block_size]
    require(
        name,
        not len(outside),
        f"slots must lie within {blocks} blocks * {block_size}",
        outside.tolist(),
    )
    kept = slots >= 0
    slots = slots[kept]
    values, counts = slots.unique(return_counts=True)
    shared = values[(counts > 1) & (values != FILLER)]
    require(name, not len(shared), "a slot must be that of one token", shared.tolist())
    key_cache.flatten(0, 1)[slots] = key[kept]
    value_cache.flatten(0, 1)[slots] = value[kept]


def _npu_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: Tensor,
) -> None:
    """Attention of sequences that lie one after the other, each over itself, into out.

    scale * Q K^T + c * mask, c being 1 for float16 and -3e38 for bfloat16 (and float32, float64): a
    float16 mask holds -inf where a key is hidden, any other 1. A mask of -10000 in bfloat16 becomes
    +inf and the result NaN.

    Contract: op_plugin/ops/atb/SelfAttentionAtb.cpp (PA_ENCODER, MASK_TYPE_NORM); ATB
    src/ops_infer/self_attention, kernels unpad_flash_attention_mix.cce (the mask as it is) and
    unpad_flashattention_bf16_mix.cce (times -3e38). Caller: VA attention/attention_v1.py:351.

    Args:
        query: (T, num_heads, D). key: (T, num_kv_heads, D). value: (T, num_kv_heads, Dv). D and Dv
            are at most 576.
        mask: (S, S') for all, or (B, S, S') for each sequence; the left upper corner is used.
        seq_len: (B,), int32; a length may be 0, and rows of out that belong to no sequence keep
            what they hold.
        out: (T, num_heads, Dv).

    Raises:
        ValueError: another dtype or shape, or a mask smaller than the longest sequence.
        NotImplementedError: seq_len (2, B), which gives queries and keys different lengths.
    """
    name = "_npu_flash_attention"
    if seq_len.dim() == 2:
        raise NotImplementedError(
            f"{name}: seq_len of shape {tuple(seq_len.shape)} is not emulated, (B,) is"
        )
    require_dtype(name, HALF, query=query, key=key, value=value, mask=mask, out=out)
    require_integers(name, 1, seq_len=seq_len)
    shapes = [tuple(x.shape) for x in (query, key, value)]
    require(
        name,
        all(len(shape) == 3 and shape[0] == len(query) for shape in shapes),
        "query, key and value must be 3-D, of as many tokens",
        shapes,
    )
    _check_heads(name, query, key.shape, value.shape, num_heads, num_kv_heads)
    require(
        name,
        max(key.shape[2], value.shape[2]) <= 576,
        "head sizes must be at most 576",
        (key.shape[2], value.shape[2]),
    )
    require_written(name, (*query.shape[:2], value.shape[2]), out=out)
    lengths = seq_len.tolist()
    require(
        name,
        min(lengths, default=0) >= 0 and sum(lengths) <= len(query),
        f"seq_len must not be negative and fit into {len(query)} tokens",
        lengths,
    )
    longest = max(lengths, default=0)
    fits = (
        mask.dim() in (2, 3)
        and min(mask.shape[-2:]) >= longest
        and mask.shape[:-2] in ((), (len(lengths),))
    )
    require(
        name,
        fits,
        f"mask must be (S, S') or ({len(lengths)}, S, S') with S and S' at least {longest}",
        tuple(mask.shape),
    )
    start = 0
    for i, length in enumerate(lengths):
        if length:
            rows = slice(start, start + length)
            own = (mask if mask.dim() == 2 else mask[i])[:length, :length]
            out[rows] = _attend(query[rows], key[rows], value[rows], scale_value, _hiding(own))
        start += length


def _npu_flash_attention_qlens(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    context_lens: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Attention of the last tokens of sequences over all their tokens in the paged cache, into out,
    the first ones having been found in the cache.

    In blocks of 128, query block m sees all of the first m + prefix key blocks, prefix being (keys
    - queries) / 128; to the scores of the next block the mask is added as _npu_flash_attention adds
    it; all later blocks are hidden.

    Contract: op_plugin/ops/atb/SelfAttentionQlensAtb.cpp (PREFIX_ENCODER, MASK_TYPE_NORM_COMPRESS,
    triangular); ATB src/ops_infer/self_attention,
    unpad_flash_attention/tiling/flash_attention_tiling_dependency.cpp ("prefix should be
    128-aligned") and the kernels of _npu_flash_attention. Caller: VA attention/attention_v1.py:376.

    Args:
        query: (T, num_heads, D), the new tokens of all sequences one after the other; D is a
            multiple of 16, at most 128.
        key_cache, value_cache: (blocks, 128, num_kv_heads, D).
        block_table: (B, columns), int32.
        mask: (128, 128).
        seq_len, context_lens: (B,), int32: each sequence's new tokens, and all of its tokens.
        out: like query.

    Raises:
        ValueError: another dtype or shape; a sequence of which something other than whole blocks of
            128 was found.
    """
    name = "_npu_flash_attention_qlens"
    require_dtype(
        name, HALF, query=query, key_cache=key_cache, value_cache=value_cache, mask=mask, out=out
    )
    _, block_size = _cache_shape(name, key_cache, value_cache)
    _check_heads(name, query, key_cache.shape[1:], value_cache.shape[1:], num_heads, num_kv_heads)
    head_sizes = key_cache.shape[3], value_cache.shape[3]
    require(
        name,
        all(size % 16 == 0 and size <= 128 for size in head_sizes),
        "head sizes must be multiples of 16, at most 128",
        head_sizes,
    )
    require(name, block_size == _BLOCK, "block_size must be 128", block_size)
    require(name, mask.shape == (_BLOCK, _BLOCK), "mask must be (128, 128)", tuple(mask.shape))
    require_integers(name, 1, seq_len=seq_len, context_lens=context_lens)
    require(
        name,
        len(seq_len) == len(context_lens) == len(block_table),
        "seq_len, context_lens and block_table must be of as many sequences",
        (len(seq_len), len(context_lens), len(block_table)),
    )
    found = [k - q for q, k in zip(seq_len.tolist(), context_lens.tolist())]
    require(
        name,
        all(n >= 0 and n % _BLOCK == 0 for n in found),
        "context_lens - seq_len must be multiples of 128, not negative",
        found,
    )

    def added(start: int, queries: int, keys: int) -> Tensor:
        i = torch.arange(queries)[:, None]
        j = torch.arange(keys)
        diagonal = j // _BLOCK - (i // _BLOCK + (keys - queries) // _BLOCK)
        inside = _hiding(mask)[i % _BLOCK, j % _BLOCK]
        return inside.masked_fill(diagonal < 0, 0).masked_fill(diagonal > 0, -torch.inf)

    _attend_paged(
        name,
        query,
        key_cache,
        value_cache,
        block_table,
        seq_len.tolist(),
        context_lens.tolist(),
        scale_value,
        added,
        out,
    )


def _npu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    *,
    workspace: Tensor | None = None,
) -> None:
    """Attention of one token of each sequence over all its tokens in the paged cache, into out.

    Contract: op_plugin/ops/atb/PagedAttentionAtb.cpp (no mask); ATB src/ops_infer/paged_attention,
    kernels pagedattention, paged_attention_tiling.cpp. Caller: VA attention/attention_v1.py:495.

    Args:
        query: (T, num_heads, D), T at least B. key_cache: (blocks, block_size, num_kv_heads, D).
            value_cache: (blocks, block_size, num_kv_heads, Dv).
        block_table: (B or more, columns), int32.
        context_lens: (B,), int32, at least 1.
        out: (T, num_heads, Dv); rows from B on keep what they hold.
        workspace: memory that an NPU computes in; not used.

    Raises:
        ValueError: another dtype, shape, head or block size; a length of 0, which makes an NPU pass
            on to the next sequence without passing on to the next query; a block that the cache
            does not have.
    """
    name = "_npu_paged_attention"
    require_dtype(name, HALF, query=query, key_cache=key_cache, value_cache=value_cache, out=out)
    _, block_size = _cache_shape(name, key_cache, value_cache)
    _check_heads(name, query, key_cache.shape[1:], value_cache.shape[1:], num_heads, num_kv_heads)
    head_sizes = key_cache.shape[3], value_cache.shape[3]
    require(
        name,
        block_size % 16 == 0 and _block_fits(*head_sizes, block_size),
        "block_size must be a multiple of 16 and head size * block_size at most 128 * 128 (256 * "
        "multiples of 128 fit too, 257 to 576 * 128, and key and value of two head sizes)",
        f"head sizes {head_sizes}, block_size {block_size}",
    )
    require_integers(name, 1, context_lens=context_lens)
    keys = context_lens.tolist()
    require(name, min(keys, default=1) >= 1, "context_lens must be at least 1", keys)
    _attend_paged(
        name,
        query,
        key_cache,
        value_cache,
        block_table,
        [1] * len(keys),
        keys,
        scale_value,
        None,
        out,
    )


def _npu_paged_attention_splitfuse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    mask: Tensor,
    seq_len: Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: Tensor,
) -> None:
    """Attention of the last tokens of sequences, one or more of each, over all their tokens in the
    paged cache, into out.

    scale * Q K^T + mask. The mask is added as it is, whatever the dtype, and nothing else hides a
    key: row t of it belongs to row t of query, column j to key j of that row's sequence. An NPU
    also skips blocks of keys that lie behind the diagonal of the longest sequence; a causal mask
    hides them anyway.

    Contract: op_plugin/ops/atb/PagedAttentionSplitfuse.cpp (CALC_TYPE_SPEC, MASK_TYPE_SPEC); ATB
    src/ops_infer/paged_attention, kernel paged_attention_mask_mix.cce. Caller: VA
    attention/attention_v1.py:570.

    Args:
        query: (T, num_heads, D), the new tokens of all sequences one after the other, D at most
            256.
        key_cache, value_cache: (blocks, block_size, num_kv_heads, D).
        block_table: (B or more, columns), int32.
        context_lens, seq_len: (B,), int32: all tokens of each sequence, and its new ones, at least
            1.
        mask: (T or more, longest context or more). ATB's own check lets shorter ones pass and the
            kernel read on.
        out: like query; rows that belong to no sequence keep what they hold.

    Raises:
        ValueError: another dtype, shape, head or block size; a block that the cache does not have.
    """
    name = "_npu_paged_attention_splitfuse"
    require_dtype(
        name, HALF, query=query, key_cache=key_cache, value_cache=value_cache, mask=mask, out=out
    )
    _, block_size = _cache_shape(name, key_cache, value_cache)
    _check_heads(name, query, key_cache.shape[1:], value_cache.shape[1:], num_heads, num_kv_heads)
    head_size = key_cache.shape[3]
    require(
        name,
        value_cache.shape[3] == head_size,
        f"value_cache must have the head size of key_cache, {head_size}",
        value_cache.shape[3],
    )
    require(
        name,
        block_size % 16 == 0 and block_size <= 128,
        "block_size must be a multiple of 16, at most 128",
        block_size,
    )
    require(
        name,
        head_size <= 256 and head_size * max(block_size, num_heads) <= 128 * 128,
        "head size must be at most 256, and head size times block_size and times num_heads at "
        "most 128 * 128",
        f"head size {head_size}, block_size {block_size}, num_heads {num_heads}",
    )
    require_integers(name, 1, context_lens=context_lens, seq_len=seq_len)
    queries = seq_len.tolist()
    keys = context_lens.tolist()
    require(
        name,
        len(queries) == len(keys) and all(1 <= q <= k for q, k in zip(queries, keys)),
        "seq_len must be from 1 to context_lens for every sequence",
        f"{queries}, context_lens {keys}",
    )
    require(
        name,
        mask.dim() == 2 and len(mask) >= sum(queries) and mask.shape[1] >= max(keys, default=0),
        f"mask must have {sum(queries)} rows and {max(keys, default=0)} columns or more",
        tuple(mask.shape),
    )

    def added(start: int, queries: int, keys: int) -> Tensor:
        return mask[start : start + queries, :keys]

    _attend_paged(
        name, query, key_cache, value_cache, block_table, queries, keys, scale_value, added, out
    )


def gather_paged(
    name: str, cache: Tensor, block_table: Tensor, lengths: list[int]
) -> Iterator[Tensor]:
    """The tokens of each sequence in a cache (blocks, block_size, ...), one tensor (length, ...) a
    sequence.

    Raises:
        ValueError: the table has too few rows or columns or names a block that the cache does not
            have; an NPU reads whatever lies there.
    """
    blocks, block_size = cache.shape[:2]
    require_integers(name, 2, block_table=block_table)
    rows, columns = block_table.shape
    require(
        name,
        rows >= len(lengths),
        f"block_table must have a row for each of {len(lengths)} sequences",
        rows,
    )
    require(
        name,
        max(lengths, default=0) <= columns * block_size,
        f"{columns} columns of block_table hold {columns * block_size} tokens, a sequence must "
        "have no more",
        max(lengths, default=0),
    )
    for row, length in zip(block_table, lengths):
        used = row[: -(-length // block_size)].long()
        require(
            name,
            not len(used) or 0 <= int(used.min()) and int(used.max()) < blocks,
            f"block_table must name blocks of a cache of {blocks}",
            used.tolist(),
        )
        yield cache[used].flatten(0, 1)[:length]


def _attend_paged(
    name: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    queries: list[int],
    keys: list[int],
    scale: float,
    added: Callable[[int, int, int], Tensor] | None,
    out: Tensor,
) -> None:
    """queries[s] rows of query over the first keys[s] tokens of sequence s; added(first row,
    queries, keys) is added to the scores.
    """
    require_written(name, (*query.shape[:2], value_cache.shape[3]), out=out)
    require(
        name,
        sum(queries) <= len(query),
        f"sequences must have no more tokens than the {len(query)} of query",
        queries,
    )
    start = 0
    caches = (gather_paged(name, cache, block_table, keys) for cache in (key_cache, value_cache))
    for count, key, value in zip(queries, *caches):
        if count:
            rows = slice(start, start + count)
            out[rows] = _attend(
                query[rows], key, value, scale, added and added(start, count, len(key))
            )
        start += count


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, added: Tensor | None
) -> Tensor:
    """Attention of (S, N, D) tensors."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return softmax_attention(q, k, v, scale, added=added)[0][0].transpose(0, 1)


def _hiding(mask: Tensor) -> Tensor:
    """What the prefill kernels add to scores for a mask of this dtype."""
    wide = mask.to(torch.promote_types(mask.dtype, torch.float32))
    return wide if mask.dtype == torch.float16 else wide * _HIDES


def _block_fits(key_size: int, value_size: int, block_size: int) -> bool:
    """Whether plain paged attention has room for blocks of these head sizes."""
    if max(key_size, value_size) > 256:
        return max(key_size, value_size) <= 576 and block_size <= 128
    if key_size == value_size == 256 and block_size >= 128:
        return block_size % 128 == 0
    return key_size != value_size or key_size * block_size <= 128 * 128


def _cache_shape(name: str, key_cache: Tensor, value_cache: Tensor) -> tuple[int, int]:
    """Blocks and block_size of a pair of caches."""
    require(
        name,
        key_cache.dim() == value_cache.dim() == 4 and key_cache.shape[:3] == value_cache.shape[:3],
        "key_cache and value_cache must be 4-D, of as many blocks, tokens in a block and heads",
        (tuple(key_cache.shape), tuple(value_cache.shape)),
    )
    return key_cache.shape[:2]


def _check_heads(
    name: str, query: Tensor, key: torch.Size, value: torch.Size, num_heads: int, num_kv_heads: int
) -> None:
    """key and value: (T or block_size, N, D). ATB takes num_kv_heads 0 for num_heads."""
    num_kv_heads = num_kv_heads or num_heads
    require(
        name,
        num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        "num_heads must be a multiple of num_kv_heads, both positive",
        f"{num_heads}, num_kv_heads {num_kv_heads}",
    )
    require(
        name,
        query.dim() == 3 and query.shape[1] == num_heads,
        f"query must be (T, num_heads {num_heads}, D)",
        tuple(query.shape),
    )
    require(
        name,
        key[1] == value[1] == num_kv_heads,
        f"key and value must have num_kv_heads {num_kv_heads} heads",
        (key[1], value[1]),
    )
    require(
        name, key[2] == query.shape[2], f"key must have query's head size {query.shape[2]}", key[2]
    )
