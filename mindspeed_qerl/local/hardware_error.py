"""Models of other hardware's arithmetic, in the place of torch's own operators.

| kind          | y = A B of linear layers, k the dimension that is summed                         |
|---------------|----------------------------------------------------------------------------------|
| `gaussian`    | y (1 + std z), z ~ N(0, 1) drawn anew for each element of each product           |
| `bf16_blocks` | k in blocks: acc = bf16(acc + bf16(A_j B_j)), from the first block to the last   |

Every product of two matrices (aten's mm, bmm, addmm): linear layers, router, output layer,
adapters, and in training their gradients. Attention's own products, norms, softmax and the
optimizer stay as they are. docs/quantization.md has the measured effects.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


class HardwareErrorMode(TorchDispatchMode):
    """Inside `with` torch computes as the other hardware would, backward passes included.

    Args:
        kinds: some of HARDWARE_ERRORS.
        gaussian_std: of the relative error, drawn with `seed`.
        block: of k.
    """

    def __init__(
        self, kinds: Iterable[str], gaussian_std: float = 0.05, block: int = 64, seed: int = 0
    ):
        super().__init__()
        self.kinds = frozenset(kinds)
        self.gaussian_std = gaussian_std
        self.block = block
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if operator in COMPOSITE:  # inference mode hands them over whole
            with self:
                return operator.decompose(*args, **kwargs)
        if operator in (aten.mm.default, aten.bmm.default):
            return self._product(*args)
        if operator is aten.addmm.default:
            bias, a, b = args
            product = self._product(a, b)
            return kwargs.get("beta", 1) * bias + kwargs.get("alpha", 1) * product
        return operator(*args, **kwargs)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """[..., m, k] @ [..., k, n]."""
        if "bf16_blocks" in self.kinds:
            y = torch.zeros((), dtype=torch.bfloat16, device=a.device)
            parts = zip(a.float().split(self.block, -1), b.float().split(self.block, -2))
            for part_a, part_b in parts:
                y = y + (part_a @ part_b).bfloat16()  # summed in float32, and rounded
            y = y.to(a.dtype)
        else:
            y = a @ b
        if "gaussian" in self.kinds:
            z = torch.randn(y.shape, generator=self.generator, dtype=torch.float32)
            y = (y * (1 + self.gaussian_std * z.to(y.device))).to(a.dtype)
        return y
