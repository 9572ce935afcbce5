"""npu_fusion_attention, CANN's flash attention, as an explicit softmax in float32: its layouts, its
masks, its formula.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

# Dimensions of query, key and value in each layout.
_LAYOUTS = {"SBH": "s b (n d)", "BSH": "b s (n d)", "BSND": "b s n d", "BNSD": "b n s d"}
_EVERYTHING = 2**31 - 1


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse=None,
    padding_mask=None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _EVERYTHING,
    next_tockens: int = _EVERYTHING,
    inner_precise: int = 0,
    prefix=None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """softmax(scale * Q K^T) V for each head over the keys that a query may see; equal groups of
    query heads share a key head.

    Query i of S1 sees key j of S2 (in layout TND: of its own sequence) if

    | sparse_mode | atten_mask | |
    |---|---|---|
    | 0 | None | always |
    | 0 | full | atten_mask[i, j] is False, and -pre_tockens <= j - i <= next_tockens |
    | 1 | full | atten_mask[i, j] is False |
    | 2 | compressed | j <= i |
    | 3 | compressed | j <= i + S2 - S1 |
    | 4 | compressed | -pre_tockens <= j - (i + S2 - S1) <= next_tockens |

    A full mask can be broadcast to (B, N, S1, S2); True hides. The compressed mask is (2048, 2048)
    and its values are not read. A query that sees no key gets the mean of all values. The masks are
    those of CANN's aclnnFlashAttentionScore; inner_precise, gen_mask_parallel and sync choose
    between implementations and mean nothing here. Callers (use_flash_attn; TND with
    reset_attention_mask): LLM core/context_parallel/dot_product_attention.py:315, LLM
    core/transformer/custom_dot_product_attention.py:341, MS
    core/transformer/flash_attention/flash_attention/adaptor.py:68.

    Args:
        query, key, value: "SBH" (S, B, N*D), "BSH", "BSND", "BNSD" or "TND" (T, N, D), T being all
            sequences one after the other.
        head_num: N of the query.
        actual_seq_qlen, actual_seq_kvlen: for TND, where each sequence ends: [3, 7] is a sequence
            of 3 tokens and one of 4.

    Returns:
        The attention, in the query's layout and dtype; the softmax's maximum and sum, float32 (B,
        N, S1, 8) or (T, N, 8) for
        TND: eight times the same number, as on an NPU; an empty tensor; and seed, offset and size
            of the dropout mask: 0, 0, 0.

    Raises:
        NotImplementedError: dropout, pse, padding_mask, prefix, another layout or mode, or a full
            mask with TND.
        ValueError: a mask that does not fit the mode, or sequences that do not fill T.
    """
    unknown = {
        "pse": pse,
        "padding_mask": padding_mask,
        "prefix": prefix,
        "keep_prob": None if keep_prob == 1 else keep_prob,
    }
    for name, given in unknown.items():
        if given is not None:
            raise NotImplementedError(
                f"npu_fusion_attention: {name} is not emulated, it was {given!r}"
            )
    if sparse_mode not in range(5):
        raise NotImplementedError(
            f"npu_fusion_attention: sparse_mode {sparse_mode} is not emulated, 0 to 4 are"
        )
    if sparse_mode >= 2 and (atten_mask is None or tuple(atten_mask.shape) != (2048, 2048)):
        shape = None if atten_mask is None else tuple(atten_mask.shape)
        raise ValueError(
            f"npu_fusion_attention: sparse_mode {sparse_mode} takes a compressed mask (2048, "
            f"2048), not {shape}"
        )
    if sparse_mode == 1 and atten_mask is None:
        raise ValueError("npu_fusion_attention: sparse_mode 1 takes a full atten_mask, not None")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = _hidden(q.shape[2], k.shape[2], atten_mask, sparse_mode, pre_tockens, next_tockens)
        return softmax_attention(q, k, v, scale, hidden=hidden)

    if input_layout == "TND":
        if atten_mask is not None and sparse_mode < 2:
            raise NotImplementedError(
                "npu_fusion_attention: a full atten_mask is not emulated for layout TND"
            )
        ends = actual_seq_qlen, actual_seq_kvlen, actual_seq_kvlen
        sequences = zip(*map(_sequences, (query, key, value), ends), strict=True)
        # An empty sequence computes nothing: upstream's lists of ends may begin with 0
        # (cu_seqlens).
        results = [
            attend(*(rearrange(x, "s n d -> 1 n s d") for x in qkv))
            for qkv in sequences
            if len(qkv[0])
        ]
        out, maximum, total = (
            torch.cat([rearrange(x, "1 n s d -> s n d") for x in column])
            for column in zip(*results)
        )
    elif input_layout in _LAYOUTS:
        pattern = _LAYOUTS[input_layout]
        q = rearrange(query, f"{pattern} -> b n s d", n=head_num)
        k = rearrange(key, f"{pattern} -> b n s d", d=q.shape[-1])
        v = rearrange(value, f"{pattern} -> b n s d", n=k.shape[1])
        out, maximum, total = attend(q, k, v)
        out = rearrange(out, f"b n s d -> {pattern}")
    else:
        known = ", ".join(["TND", *_LAYOUTS])
        raise NotImplementedError(
            f"npu_fusion_attention: input_layout {input_layout} is not emulated: {known} are"
        )
    return out, maximum, total, query.new_empty(0), 0, 0, 0


def _sequences(x: Tensor, ends: list[int] | Tensor | None) -> tuple[Tensor, ...]:
    """The sequences of a TND tensor."""
    ends = [] if ends is None else torch.as_tensor(ends).tolist()
    if not ends or ends[-1] != len(x):
        raise ValueError(
            f"npu_fusion_attention: the sequences end at {ends}, the last must end at T = {len(x)}"
        )
    return x.split([end - start for start, end in zip([0, *ends], ends)])


def _hidden(
    s1: int, s2: int, mask: Tensor | None, sparse_mode: int, before: int, after: int
) -> Tensor | None:
    """True where a query (s1) may not see a key (s2); None if it may see all."""
    if mask is None:
        return None
    distance = torch.arange(s2) - torch.arange(s1)[:, None]
    if sparse_mode >= 3:
        distance = distance - (s2 - s1)  # the diagonal ends in the lower right corner
    if sparse_mode in (2, 3):
        before = _EVERYTHING
        after = 0
    outside = (distance > after) | (distance < -before)
    return {0: mask.bool() | outside, 1: mask.bool()}[sparse_mode] if sparse_mode < 2 else outside


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    hidden: Tensor | None = None,
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of (B, N, S, D) tensors, computed in float32 (float64 for float64); with the
    softmax's maximum and sum.

    Args:
        hidden: (S1, S2), or what can be broadcast to (B, N, S1, S2): True where a query does not
            see a key.
        added: of the same shape, added to scale * Q K^T.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (x.to(wide).repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.to(wide) @ k.transpose(-1, -2) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(wide).min)
    if added is not None:
        scores = scores + added
    maximum = scores.amax(-1, keepdim=True)
    total = (scores - maximum).exp().sum(-1, keepdim=True)
    out = (F.softmax(scores, -1) @ v).to(q.dtype)
    return out, *(x.detach().float().expand(*x.shape[:-1], 8) for x in (maximum, total))
