"""npu_fused_infer_attention_score, CANN's attention for inference, over a paged cache, as an
explicit softmax.
"""

from functools import cache
from itertools import pairwise

import torch
from einops import rearrange
from torch import Tensor

from mindspeed_qerl.emulation.attention import softmax_attention
from mindspeed_qerl.emulation.contract import require, require_dtype
from mindspeed_qerl.emulation.paged import gather_paged

_EVERYTHING = 2**31 - 1
# Arguments that are emulated for None (or mode 0) only.
_LEFT_OUT = (
    "pse_shift dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 "
    "antiquant_scale antiquant_offset key_antiquant_scale key_antiquant_offset "
    "value_antiquant_scale value_antiquant_offset query_padding_size kv_padding_size "
    "key_shared_prefix value_shared_prefix actual_shared_prefix_len query_rope key_rope "
    "key_rope_antiquant_scale antiquant_mode key_antiquant_mode value_antiquant_mode"
).split()


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift=None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    dequant_scale1=None,
    quant_scale1=None,
    dequant_scale2=None,
    quant_scale2=None,
    quant_offset2=None,
    antiquant_scale=None,
    antiquant_offset=None,
    key_antiquant_scale=None,
    key_antiquant_offset=None,
    value_antiquant_scale=None,
    value_antiquant_offset=None,
    block_table: Tensor | None = None,
    query_padding_size=None,
    kv_padding_size=None,
    key_shared_prefix=None,
    value_shared_prefix=None,
    actual_shared_prefix_len=None,
    query_rope=None,
    key_rope=None,
    key_rope_antiquant_scale=None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * Q K^T) V for the last tokens of sequences (layout TND), over all their tokens
    in a paged cache.

    sparse_mode 0: a query sees all keys. 3: query i of S1 sees key j of S2 if j <= i + S2 - S1. The
    mask of mode 3 is compressed: (2048, 2048), 1 above the diagonal. CANN leaves it to the caller
    that it is; its kernel reads parts of it, so that another mask hides other keys in some blocks.
    Here another mask is refused.

    Contract: Ascend/op-plugin 7.2.0, docs/context/torch_npu-npu_fused_infer_attention_score.md;
    hicann/ops-transformer,
    attention/fused_infer_attention_score/docs/aclnnFusedInferAttentionScoreV3.md, and the checks in
    attention/prompt_flash_attention/op_host/prompt_flash_attention_tiling.cpp. Where they differ,
    the source is followed: by the pages TND takes a paged cache only if D is 512, D of 64 never,
    and mode 3 only fewer queries than keys, but the source takes all three, and VA calls it so. The
    pages also want a cache of as many blocks as the sequences have together; the source does not
    check it, and sequences that share blocks may have more.

    pre_tokens and next_tokens mean nothing in these modes, inner_precise nothing for bfloat16.
    Caller: VA attention/attention_v1.py:554 (CANN 8.3). Its call at :412, a sliding window by
    pre_tokens in layout BSH, is not emulated: the page says that CANN ignores pre_tokens for one
    query.

    Args:
        query: (T, num_heads, D), D 64, 128 or 192, bfloat16; float32 and float64:
            contract.ONLY_DOCUMENTED_DTYPES.
        key, value: (blocks, block_size, num_key_value_heads * D) or (blocks, num_key_value_heads,
            block_size, D).
        atten_mask: bool, int8 or uint8, (2048, 2048), with dimensions of 1 before it or not.
        actual_seq_lengths: where each sequence's queries end, the last at T: [3, 7] is a sequence
            of 3 and one of 4.
        actual_seq_lengths_kv: how many keys each sequence has.
        block_table: (B, columns), int32.
        num_key_value_heads: 0 is num_heads.
        block_size: that of the cache: a multiple of 128, at most 512.

    Returns:
        The attention, like query; log(sum(exp(scores))) for softmax_lse_flag, float32 (T,
        num_heads, 1), else empty.

    Raises:
        NotImplementedError: another layout, mode or argument; queries without keys.
        ValueError: another dtype, shape, head or block size, or a mask that the mode does not take.
    """
    name = "npu_fused_infer_attention_score"
    arguments = locals()
    for argument in _LEFT_OUT:
        given = arguments[argument]
        if isinstance(given, Tensor) or given:
            raise NotImplementedError(f"{name}: {argument} is not emulated, it was {given!r}")
    if input_layout != "TND":
        raise NotImplementedError(
            f"{name}: input_layout {input_layout!r} is not emulated, 'TND' is"
        )
    if block_table is None:
        raise NotImplementedError(
            f"{name}: block_table None is not emulated: keys must lie in a paged cache"
        )
    if sparse_mode not in (0, 3):
        raise NotImplementedError(f"{name}: sparse_mode {sparse_mode} is not emulated, 0 and 3 are")
    _check_mask(name, atten_mask, sparse_mode)
    require_dtype(name, (torch.bfloat16,), query=query, key=key, value=value)
    heads = num_key_value_heads or num_heads
    require(
        name,
        num_heads > 0 and heads > 0 and num_heads % heads == 0 and num_heads // heads <= 64,
        "num_heads must be a multiple of num_key_value_heads, at most 64 times as many",
        f"{num_heads}, num_key_value_heads {num_key_value_heads}",
    )
    require(
        name,
        query.dim() == 3 and query.shape[1] == num_heads and len(query) <= 2**20,
        f"query must be (T, num_heads {num_heads}, D), T at most 2^20",
        tuple(query.shape),
    )
    require(
        name,
        query.shape[2] in (64, 128, 192),
        "the head size must be 64, 128 or 192",
        query.shape[2],
    )
    caches = [
        _cache(name, argument, x, heads, query.shape[2], block_size)
        for argument, x in (("key", key), ("value", value))
    ]
    require(
        name,
        key.shape == value.shape,
        f"value must have key's shape {tuple(key.shape)}",
        tuple(value.shape),
    )
    queries, keys = _lengths(name, actual_seq_lengths, actual_seq_lengths_kv, len(query))
    require(
        name,
        len(block_table) == len(queries),
        f"block_table must have {len(queries)} rows, one a sequence",
        tuple(block_table.shape),
    )
    require(
        name,
        sparse_mode == 0 or all(q <= k for q, k in zip(queries, keys)),
        "sparse_mode 3 wants no more queries than keys",
        f"{queries} queries, {keys} keys",
    )
    if any(q and not k for q, k in zip(queries, keys)):
        raise NotImplementedError(
            f"{name}: queries without keys are not emulated: {queries} queries, {keys} keys"
        )

    out = torch.empty_like(query)
    lse = query.new_empty((*query.shape[:2], 1), dtype=torch.float32)
    start = 0
    for count, k, v in zip(queries, *(gather_paged(name, x, block_table, keys) for x in caches)):
        rows = slice(start, start + count)
        start += count
        if count:
            distance = torch.arange(len(k)) - torch.arange(count)[:, None]
            hidden = distance > len(k) - count if sparse_mode == 3 else None
            q, k, v = (rearrange(x, "s n d -> 1 n s d") for x in (query[rows], k, v))
            part, maximum, total = softmax_attention(q, k, v, scale, hidden=hidden)
            out[rows] = rearrange(part, "1 n s d -> s n d")
            lse[rows] = rearrange((maximum + total.log())[..., :1], "1 n s one -> s n one")
    return out, lse if softmax_lse_flag else lse.new_empty(0)


@cache
def _compressed_mask() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def _check_mask(name: str, mask: Tensor | None, sparse_mode: int) -> None:
    if sparse_mode == 0:
        require(
            name,
            mask is None,
            "sparse_mode 0 takes no atten_mask in layout TND",
            None if mask is None else f"one of shape {tuple(mask.shape)}",
        )
        return
    shape = None if mask is None else tuple(mask.shape)
    require(
        name,
        shape in [(1,) * ones + (2048, 2048) for ones in range(3)],
        "sparse_mode 3 takes a compressed atten_mask (2048, 2048)",
        shape,
    )
    require(
        name,
        mask.dtype in (torch.bool, torch.int8, torch.uint8),
        "atten_mask must be bool, int8 or uint8",
        mask.dtype,
    )
    mask = mask.reshape(2048, 2048).view(torch.int8)
    require(
        name,
        torch.equal(mask, _compressed_mask()),
        "atten_mask must be torch.ones(2048, 2048).triu(1)",
        "another compressed mask",
    )


def _cache(
    name: str, argument: str, x: Tensor, heads: int, head_size: int, block_size: int
) -> Tensor:
    """A key or value cache as (blocks, block_size, N, D)."""
    require(
        name,
        block_size % 128 == 0 and 128 <= block_size <= 512,
        "block_size must be a multiple of 128, at most 512",
        block_size,
    )
    blocks = len(x)
    shapes = (blocks, block_size, heads * head_size), (blocks, heads, block_size, head_size)
    require(
        name,
        tuple(x.shape) in shapes,
        f"{argument} must be {shapes[0]}: (blocks, block_size, N * D), or {shapes[1]}",
        tuple(x.shape),
    )
    if x.dim() == 4:
        return x.transpose(1, 2)
    require(
        name,
        x.shape[2] <= 65535,
        "N * D of a 3-D cache must be at most 65535 (a 4-D one has no such limit)",
        x.shape[2],
    )
    return x.unflatten(2, (heads, head_size))


def _lengths(
    name: str, ends: list[int] | None, keys: list[int] | None, tokens: int
) -> tuple[list[int], list[int]]:
    """Queries and keys of each sequence."""
    require(
        name,
        ends is not None and keys is not None and 0 < len(ends) == len(keys) <= 4096,
        "actual_seq_lengths and actual_seq_lengths_kv must be given, as many, 1 to 4096",
        f"{ends}, {keys}",
    )
    queries = [end - start for start, end in pairwise([0, *ends])]
    require(
        name,
        min(queries) >= 0 and ends[-1] == tokens,
        f"actual_seq_lengths must not fall and must end at T = {tokens}",
        ends,
    )
    require(
        name,
        min(keys) >= 0 and max(keys) > 0,
        "actual_seq_lengths_kv must be lengths, not all 0",
        keys,
    )
    return queries, keys
