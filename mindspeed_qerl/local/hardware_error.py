"""Stated models of other hardware: what its arithmetic does to a model, put in the place of torch's
own operators.

| kind          | y = A B of linear layers, k the dimension that is summed
|
|---------------|-------------------------------------------------------------------------------------------------|
| `gaussian`    | y (1 + std z), z ~ N(0, 1) drawn anew for each element of each product
|
| `bf16_blocks` | k in blocks: acc = bf16(acc + bf16(A_j B_j)), from the first block to the last
|
| `reordered`   | k in blocks: acc = acc + A_j B_j in float32, from the last block to the first
|
| `silu_table`  | silu(x) = x s(x), s the sigmoid interpolated linearly between knots 1/2 apart on
[-8, 8]        |

Every product of two matrices (aten's mm, bmm, addmm) is meant: linear layers, router, output layer,
adapters, and in training their gradients. Attention's own products, norms, softmax and the
optimizer are left alone. docs/quantization.md has the measured effects.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KNOTS_PER_UNIT, LAST_KNOT = 2, 8
Layer = Callable[[int, torch.Tensor], torch.Tensor]
COMPOSITE = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


class HardwareErrorMode(TorchDispatchMode):
    """Inside `with` torch computes as the other hardware would, backward passes included.

    kinds: some of HARDWARE_ERRORS. gaussian_std: of the relative error, drawn with `seed`. block:
    of k.
    """

    def __init__(
        self, kinds: Iterable[str], gaussian_std: float = 0.05, block: int = 64, seed: int = 0
    ):
        super().__init__()
        self.kinds, self.gaussian_std, self.block = frozenset(kinds), gaussian_std, block
        self.generator = torch.Generator().manual_seed(seed)
        self.products = 0  # how many were computed so, a proof that it was not passed by
        self._own: dict[Any, Callable] = {}
        aten = torch.ops.aten
        if self.kinds - {"silu_table"}:
            self._own |= {
                aten.mm.default: self._product,
                aten.bmm.default: self._product,
                aten.addmm.default: self._addmm,
            }
        if "silu_table" in self.kinds:
            self._own |= {
                aten.silu.default: silu_of_table,
                aten.silu_backward.default: silu_of_table_backward,
            }

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if operator in COMPOSITE:  # inference mode hands them over whole
            with self:
                return operator.decompose(*args, **(kwargs or {}))
        return self._own.get(operator, operator)(*args, **(kwargs or {}))

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """[..., m, k] @ [..., k, n]."""
        self.products += 1
        if "bf16_blocks" in self.kinds or "reordered" in self.kinds:
            y = self._in_blocks(a.float(), b.float()).to(a.dtype)
        else:
            y = a @ b
        if "gaussian" in self.kinds:
            z = torch.randn(y.shape, generator=self.generator, dtype=torch.float32)
            y = (y * (1 + self.gaussian_std * z.to(y.device))).to(a.dtype)
        return y

    def _in_blocks(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept = (lambda x: x.bfloat16().float()) if "bf16_blocks" in self.kinds else (lambda x: x)
        parts = list(zip(a.split(self.block, -1), b.split(self.block, -2)))
        total = torch.zeros(*a.shape[:-1], b.shape[-1], device=a.device)
        for part_a, part_b in reversed(parts) if "reordered" in self.kinds else parts:
            total = kept(total + kept(part_a @ part_b))
        return total

    def _addmm(
        self,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
    ) -> torch.Tensor:
        return beta * bias + alpha * self._product(a, b)


def silu_of_table(x: torch.Tensor) -> torch.Tensor:
    """x s(x) with the sigmoid of a table; of x's shape and dtype."""
    value, _ = _sigmoid_of_table(x)
    return (x * value).to(x.dtype)


def silu_of_table_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `silu_of_table` in x."""
    value, slope = _sigmoid_of_table(x)
    return (gradient * (value + x * slope)).to(x.dtype)


def _sigmoid_of_table(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(s(x), s'(x)), float32 or wider; beyond the last knots s stays what it is there."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    knots = torch.linspace(
        -LAST_KNOT, LAST_KNOT, 2 * LAST_KNOT * KNOTS_PER_UNIT + 1, device=x.device, dtype=x.dtype
    ).sigmoid()
    position = (x.clamp(-LAST_KNOT, LAST_KNOT) + LAST_KNOT) * KNOTS_PER_UNIT
    left = (
        position.floor().clamp(max=len(knots) - 2).nan_to_num().long()
    )  # NaN stays NaN by way of `position`
    rise = knots[left + 1] - knots[left]
    return knots[left] + (position - left) * rise, rise * KNOTS_PER_UNIT * (x.abs() < LAST_KNOT)


def plain_experts(
    gate_up: Layer,
    down: Layer,
    /,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **_: Any,
) -> None:
    """What vLLM's fused CPU kernel computes for SwiGLU experts, by torch's operators.

    gate_up: an expert's layer with the gate above up, (number of the expert, [n, h]) -> [n, 2 f].
    down: (number, [n, f]) -> [n, h]. output, hidden_states: [tokens, h]. topk_*: [tokens, k].
    """
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = gate_up(expert, hidden_states[rows]).chunk(2, -1)
        outcome = down(expert, torch.nn.functional.silu(gate) * up)
        output.index_add_(
            0, rows, (outcome * topk_weights[rows, slots].unsqueeze(1)).to(output.dtype)
        )
