"""What vllm-ascend calls beside attention: positions in place, sampling, prefetching. Formulas as
in operators.py.
"""

import torch
from torch import Tensor

from mindspeed_qerl.emulation.contract import HALF, require, require_dtype, require_integers
from mindspeed_qerl.emulation.operators import npu_rotary_mul

# The first cos_sin_cache that this process gave to _npu_rotary_embedding.
_first_rope_table: Tensor | None = None


def _npu_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
) -> None:
    """Turn query and key by their positions, in place: x * cos + rotate(x) * sin, rounded once.

    A head is as wide as the table, R, whatever head_size says: rotate is (-x[R/2:], x[:R/2]) for
    is_neox_style, else (-x1, x0, -x3, x2, ...), and then head_size must be R. For R < head_size a
    caller passes the turned parts of the heads alone.

    torch_npu keeps the first table that it is given and uses it for the rest of the process,
    whatever the later calls pass. Here another table is refused.

    Contract: Ascend/op-plugin 7.2.0, op_plugin/ops/atb/RopeAtb.cpp, without a page; what it calls
    is on hicann/ascend-transformer-boost, src/kernels/document/ops/rope.md, with the checks of
    src/ops_infer/rope/. Caller: VA ops/rotary_embedding.py:84,101.

    Args:
        positions: T rows of the table, in any shape.
        query, key: (T, heads * R), float16 or bfloat16 (see contract.ONLY_DOCUMENTED_DTYPES),
            contiguous, R a multiple of 16; query has a multiple of key's heads.
        cos_sin_cache: (positions, R): R/2 cosines, then R/2 sines; in query's dtype, or float32 for
            float16.

    Raises:
        ValueError: another dtype or shape, another table than the first.
        NotImplementedError: query and key (B, S, heads, R).
    """
    global _first_rope_table
    name = "_npu_rotary_embedding"
    if query.dim() == 4:
        raise NotImplementedError(
            f"{name}: query of shape {tuple(query.shape)} is not emulated, (T, heads * R) is"
        )
    require_dtype(name, HALF, query=query, key=key)
    require(
        name,
        cos_sin_cache.dtype
        in (query.dtype, torch.float32 if query.dtype == torch.float16 else query.dtype),
        f"cos_sin_cache must be {query.dtype} like query (or float32 for float16)",
        cos_sin_cache.dtype,
    )
    size = cos_sin_cache.shape[-1]
    tokens = positions.numel()
    require(
        name,
        cos_sin_cache.dim() == 2 and size % 16 == 0,
        "cos_sin_cache must be (positions, multiple of 16)",
        tuple(cos_sin_cache.shape),
    )
    for argument, x in (("query", query), ("key", key)):
        require(
            name,
            x.dim() == 2 and len(x) == tokens and x.shape[1] % size == 0,
            f"{argument} must be ({tokens}, a multiple of {size}), as positions and cos_sin_cache "
            "say",
            tuple(x.shape),
        )
        require(
            name,
            x.is_contiguous(),
            f"{argument} is turned in place and must be contiguous",
            x.stride(),
        )
    require(
        name,
        query.shape[1] % key.shape[1] == 0,
        f"query must have a multiple of key's {key.shape[1]} columns",
        query.shape[1],
    )
    require(
        name,
        is_neox_style or head_size == size,
        f"head_size must be the width {size} of cos_sin_cache unless is_neox_style",
        head_size,
    )
    if _first_rope_table is None:
        _first_rope_table = cos_sin_cache
    first = _first_rope_table
    require(
        name,
        cos_sin_cache is first
        or cos_sin_cache.dtype == first.dtype
        and torch.equal(cos_sin_cache, first),
        "cos_sin_cache must be the first one of this process, which torch_npu uses for all calls",
        "another one: run each model in a process of its own",
    )

    cos, sin = _chosen(name, cos_sin_cache, positions.flatten()).chunk(2, -1)
    for x in (query, key):
        heads = x.view(tokens, -1, size)
        heads.copy_(_turned(heads, cos, sin, is_neox_style))


def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSH",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """Turn query and key by x * cos + rotate(x) * sin, in place, rotate as in
    operators.npu_rotary_mul.

    Contract: hicann/ops-transformer,
    posembedding/apply_rotary_pos_emb/docs/aclnnApplyRotaryPosEmbV2.md; Ascend/op-plugin 7.2.0,
    op_plugin/ops/opapi/ApplyRotaryPosEmbNpuOpApi.cpp (there is no page for it). Caller: VA
    ops/rotary_embedding.py:73.

    Args:
        query, key: (B, S, N, 128), N of its own each; float16, bfloat16 or float32. cos, sin: the
            same with N = 1.

    Returns:
        query and key themselves.

    Raises:
        ValueError: another dtype or shape.
        NotImplementedError: rotary_mode "quarter", another layout.
    """
    name = "npu_apply_rotary_pos_emb"
    require(
        name,
        rotary_mode in ("half", "interleave", "quarter"),
        "rotary_mode must be half, interleave or quarter",
        repr(rotary_mode),
    )
    if rotary_mode == "quarter" or layout != "BSH":
        raise NotImplementedError(
            f"{name}: rotary_mode {rotary_mode!r} with layout {layout!r} is not emulated, 'half' and "
            "'interleave' with 'BSH' are"
        )
    require_dtype(name, (*HALF, torch.float32), query=query, key=key, cos=cos, sin=sin)
    shapes = [list(x.shape) for x in (query, key, cos, sin)]
    require(
        name,
        all(len(shape) == 4 and shape[3] == 128 for shape in shapes),
        "query, key, cos and sin must be 4-D with a head size of 128",
        shapes,
    )
    numbers = [shape.pop(2) for shape in shapes]
    require(
        name,
        all(shape == shapes[0] for shape in shapes) and numbers[2:] == [1, 1],
        "query, key, cos and sin must differ in dimension 2, the heads, alone, cos and sin having "
        "one",
        [tuple(x.shape) for x in (query, key, cos, sin)],
    )
    for x in (query, key):
        x.copy_(npu_rotary_mul(x, cos, sin, rotary_mode))
    return query, key


def _chosen(name: str, table: Tensor, positions: Tensor) -> Tensor:
    """Rows of a table of positions."""
    require(name, not positions.is_floating_point(), "positions must be integers", positions.dtype)
    outside = positions[(positions < 0) | (positions >= len(table))]
    require(
        name,
        not len(outside),
        f"positions must be rows of a table of {len(table)}",
        outside.tolist(),
    )
    return table[positions.long()]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    """x (T, N, R) turned by (T, R/2) angles: pairs of columns are R/2 apart (halves) or neighbours."""
    cos, sin = (
        (torch.cat((t, t), -1) if halves else t.repeat_interleave(2, -1))[:, None]
        for t in (cos, sin)
    )
    return npu_rotary_mul(x, cos, sin, "half" if halves else "interleave")


def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """logits, -inf for all but the k largest of each row, then for the smallest ones of probability
    1 - p together.

    Both steps go by the ascending, stable order of a row. Values equal to the k-th largest all
    stay; of the rest those go whose cumulative probability, from the smallest up, is at most 1 - p,
    but never the last.

    Contract: Ascend/op-plugin 7.2.0, docs/context/torch_npu-npu_top_k_top_p.md; hicann/ops-nn
    8.5.0, index/apply_top_k_top_p_with_sorted/docs/aclnnApplyTopKTopP.md. The first asks for both p
    and k, the second, whose operator the first calls, for one of them; the last line of the formula
    of both is written as a gather, but what it describes, the original order, is a scatter. Caller:
    VA sample/sampler.py:31.

    Args:
        logits: (B, V), float32, float16 or bfloat16.
        p: (B,), like logits, from 0 to 1. k: (B,), int32, from 1 to 1024 and at most V. None leaves
            out its step.

    Returns:
        A new tensor like logits.

    Raises:
        ValueError: another dtype, shape or value; neither p nor k.
    """
    name = "npu_top_k_top_p"
    require(name, p is not None or k is not None, "p or k must be given", "neither")
    require_dtype(name, (torch.float32, *HALF), logits=logits, **({} if p is None else {"p": p}))
    require(name, logits.dim() == 2, "logits must be 2-D", tuple(logits.shape))
    rows, columns = logits.shape
    values, order = logits.sort(dim=-1, stable=True)
    if k is not None:
        require_integers(name, 1, k=k)
        limit = min(1024, columns)
        require(
            name,
            len(k) == rows and bool(((k >= 1) & (k <= limit)).all()),
            f"k must be {rows} numbers from 1 to {limit}",
            k.tolist(),
        )
        kth = values.gather(1, columns - k.long()[:, None])
        values = values.masked_fill(values < kth, -torch.inf)
    if p is not None:
        require(
            name,
            p.shape == (rows,) and bool(((p >= 0) & (p <= 1)).all()),
            f"p must be {rows} numbers from 0 to 1",
            p.tolist(),
        )
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        dropped = wide.softmax(-1).cumsum(-1) <= 1 - p.to(wide.dtype)[:, None]
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, values)


def npu_prefetch(self: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Nothing: it moves a weight into an NPU's cache and changes no value.

    Contract: Ascend/op-plugin 7.2.0, docs/context/torch_npu-npu_prefetch.md. Caller: VA
    ops/register_custom_ops.py:112,167, ops/weight_prefetch.py:114.

    Raises:
        ValueError: max_size is not positive, or offset does not lie in the weight.
    """
    require("npu_prefetch", max_size > 0, "max_size must be positive", max_size)
    require(
        "npu_prefetch",
        0 <= offset < self.nbytes,
        f"offset must lie in the {self.nbytes} bytes of the weight",
        offset,
    )
