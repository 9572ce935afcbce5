"""Did the weights arrive? What a trainer sent, element by element of a sample, beside what a
rollout engine computes with (held.py); and the share of the update that arrived (proof.py).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .held import EXPERT_PARTS, Held, Named

Factors = tuple[Tensor, Tensor, float]  # A, B and scaling of an adapter
# as transformers 5 stacks experts -> as vLLM stacks them
STACKED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PREFIX = re.compile(r"^(base_model\.model\.)?|\.base_layer(?=\.)")  # of PEFT
# why a tensor that both sides have is not compared
OTHER_FORM = "it was sent in a form that vLLM does not hold"
UNCHANGED = "none of its sampled elements was sent: NaN, which sparse syncs leave as they are"


@dataclass(frozen=True)
class Sample:
    """Elements of a whole tensor.

    Attributes:
        values: as sent. index: [elements, dimensions].
        exact: the values before any rounding, up to constants; None: not known.
    """

    values: Tensor
    index: Tensor
    shape: torch.Size
    exact: Tensor | None


class Failure(NamedTuple):
    """A tensor that did not arrive, and in which way."""

    name: str
    problem: str


class Arrival:
    """Compares what was sent in this sync, and in the one before it, with what is held.

    Of a large tensor three samples are noted: one that stays, from which the share is known; one
    of this sync, which the sync before noted, too; and one of the next sync.

    Args:
        elements: of each tensor and sample; 0: all of them.
        tolerance: differences that are still equal, in units of the rounding of the tensor's
            largest sampled value; 0: bits. More where the sender rounds elsewhere than we do.

    Attributes:
        share: of the update since the first sync, by the last comparison: `arrived`, None where
            the update is not known, and `arrived_error`; empty before the first update.
        not_compared: why, by name, of what was sent and not compared then.
    """

    def __init__(self, elements: int = 64, tolerance: float = 0.0):
        self.elements = elements
        self.tolerance = tolerance
        self.number = 1  # of the sync; all ranks count the same
        self.sent: dict[str, Sample] = {}
        self.before: dict[str, Sample] = {}
        self.adapters: Mapping[str, list[Factors]] = {}
        # by name and place: what was sent first, and what was held then
        self.first: dict[tuple[str, tuple[int, ...]], tuple[Sample, Tensor]] = {}
        self.share: dict[str, Any] = {}
        self.not_compared: dict[str, str] = {}

    def begin(self, adapters: Mapping[str, list[Factors]] | None = None) -> None:
        """A new sync starts; adapters: those that are merged into weights, by the names of these,
        if they are known.
        """
        self.adapters = adapters or {}
        if self.sent:
            self.before = self.sent
            self.sent = {}
            self.number += 1

    def expect(self, name: str, tensor: Tensor, sent: Tensor | None = None) -> None:
        """`tensor` is sent under a name of transformers, of PEFT, or of stacked experts; `sent`:
        what it is rounded to before.
        """
        parts = parts_of(name, tensor if sent is None else sent)
        for (part_name, exact), (_, part) in zip(parts_of(name, tensor), parts):
            index = positions(part.shape, self.elements, self.number)
            known = self._exact(part_name, exact, index)
            self.sent[part_name] = Sample(_elements(part, index), index, part.shape, known)

    def _exact(self, name: str, tensor: Tensor, index: Tensor) -> Tensor | None:
        adapters = self.adapters.get(name, [])
        if adapters and all(b.shape[:1] + a.shape[1:] == tensor.shape for a, b, _ in adapters):
            update = torch.zeros(len(index))
            for a, b, scaling in adapters:
                rows, columns = index.to(b.device).T
                factors = b.detach()[rows].float() * a.detach()[:, columns].T.float()
                update += scaling * factors.sum(1).cpu()
            return update
        return _elements(tensor, index) if tensor.dtype == torch.float32 else None

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that was sent."""
        return max((math.prod(sample.shape) for sample in self.sent.values()), default=0)

    @property
    def unchanged(self) -> bool:
        """True if all that was sent is what the sync before had sent."""
        if not self.before or self.sent.keys() != self.before.keys():
            return False
        for name, sample in self.sent.items():
            now, then = self._of_both_syncs(sample.shape)
            if not torch.equal(sample.values[now], self.before[name].values[then]):
                return False
        return True

    def _of_both_syncs(self, shape: torch.Size) -> tuple[slice, slice]:
        """Returns which noted elements the sync before had noted, too: where now, where then."""
        few = self.elements
        if not 0 < few < math.prod(shape):
            return slice(0, None), slice(0, None)
        return slice(few, 2 * few), slice(2 * few, None)

    def failures(
        self, held: Iterable[Held], unknown: Mapping[str, str] | None = None
    ) -> list[Failure]:
        """Returns what is not there as it was sent, or is there and was never sent for.

        Args:
            unknown: why nothing is said about tensors, by the beginning of their names
                (`held.not_compared`).

        >>> arrival = Arrival()
        >>> arrival.expect("up.weight", torch.eye(2))
        >>> arrival.failures([Held("up.weight", torch.zeros(2, 2), (0, 0))])
        [Failure(name='up.weight', problem='all of it is 0')]
        """
        failures = []
        names = set()
        moves: list[Tensor] = []
        self.not_compared = {}
        for part in held:
            names.add(part.name)
            if part.name not in self.sent:
                continue
            if reason := self._reason(part):
                self.not_compared[part.name] = reason
                continue
            place = self.sent[part.name].index
            if part.start:
                place = place - torch.tensor(part.start)
            inside = ((place >= 0) & (place < torch.tensor(part.part.shape))).all(1)
            if not inside.any():
                continue
            values = _elements(part.part, place[inside])
            if problem := self._problem(part, values, inside):
                failures.append(Failure(part.name, problem))
            elif self.sent[part.name].values.isnan().all():
                self.not_compared[part.name] = UNCHANGED
            moves += self._moves(part, values, inside)
        sums = torch.stack(moves).sum(0).tolist() if moves else 3 * [math.nan]
        self.share = {"arrived": None} if math.isnan(sums[1]) else share_of(*sums)
        failures += self._missing(names, unknown or {})
        return sorted(failures)

    def _reason(self, held: Held) -> str | None:
        """Returns why `held` is not compared with what was sent under its name; None if it is."""
        sample = self.sent[held.name]
        is_other = len(sample.shape) != held.part.dim()
        if not held.start:  # all of it
            is_other |= sample.shape != held.part.shape
        is_number = sample.values.is_floating_point() and sample.values.itemsize > 1
        is_other |= held.part.is_floating_point() and not is_number
        return OTHER_FORM if is_other else None

    def _missing(self, names: set[str], unknown: Mapping[str, str]) -> Iterator[Failure]:
        """Yields what was sent and is not among `names`, which are held; notes what may be, in a
        form that is not known.
        """
        for name in self.sent.keys() - names:
            layer, experts, _ = name.partition(".experts.")
            reasons = [why for start, why in unknown.items() if name.startswith(start)]
            if reasons:
                self.not_compared[name] = reasons[0]
                continue
            # another worker may hold an expert, where this one holds others of its layer; an output
            # layer may be the embedding
            is_beside = experts and any(other.startswith(layer + experts) for other in names)
            if not is_beside and not name.endswith("lm_head.weight"):
                yield Failure(name, "no module of the rollout model has it")

    def _moves(self, held: Held, values: Tensor, inside: Tensor) -> list[Tensor]:
        """Returns of M, what the elements moved since the first sync, and of U, by how much they
        should have: [<M, U>, <U, U>, variance of <M, U>]; NaN if they moved, and U is not known.

        Args:
            values: of the sample's elements that are in this part. inside: which ones, bool.
        """
        sample = self.sent[held.name]
        now, _ = self._of_both_syncs(sample.shape)
        stay = now.start or None  # the sample that stays, or all
        inside = inside[:stay]
        values = values[: inside.sum()]
        first, before = self.first.setdefault((held.name, held.start), (sample, values))
        moved = values.double() - before.double()
        if sample.exact is None or first.exact is None:
            return [torch.full((3,), math.nan)] if moved.any() else []
        update = (sample.exact.double() - first.exact.double())[:stay][inside]
        variance = variance_of_rounding(values.double(), update, torch.finfo(values.dtype).eps)
        return [torch.stack([moved * update, update**2, variance * update**2]).sum(1)]

    def _problem(self, held: Held, values: Tensor, inside: Tensor) -> str | None:
        sample = self.sent[held.name]
        expected = sample.values[inside]
        wrong = self._wrong(values, expected)
        if not wrong.any():
            return None
        if values.isnan().any():
            return "it has NaN"
        if not held.part.any():
            return "all of it is 0"
        before = self.before.get(held.name)
        if before and before.shape == sample.shape:
            now, then = self._of_both_syncs(sample.shape)
            first = inside[: now.start].sum()
            old = before.values[then][inside[now]]
            values_then = values[first : first + len(old)]
            if self._is(values_then, old):
                return "it is still what the sync before had sent"
        if held.part.dim() == 2 and held.part.shape == sample.shape == held.part.shape[::-1]:
            mirrored = _elements(held.part, sample.index[inside].flip(1))
            if self._is(mirrored, expected):
                return "it is transposed"
        for name, other in self.sent.items():
            is_like = other.shape == sample.shape
            if is_like and self._is(values, other.values[inside]):
                return f"it is {name}"
        if self._is(values, expected.bfloat16()):
            return "it was rounded to bfloat16"
        if factor := factor_of(values, expected):
            return f"it is {factor:.3g} times what was sent"
        return f"{wrong.sum()} of {len(values)} sampled elements differ"

    def _is(self, values: Tensor, other: Tensor) -> bool:
        """Returns True if `other` explains `values`, not by having none that were sent."""
        return not (other.isnan().all() or self._wrong(values, other).any())

    def _wrong(self, values: Tensor, sent: Tensor) -> Tensor:
        """Returns which `values` are not those that were sent, rounded to their dtype; where NaN
        was sent, any number is right.
        """
        sent = sent.to(values.dtype)
        wrong = values != sent
        if self.tolerance:
            largest = sent.abs().nan_to_num().max().item()
            allowed = self.tolerance * torch.finfo(values.dtype).eps * largest
            wrong = (values.float() - sent.float()).abs() > allowed
        return (wrong & ~sent.isnan()) | values.isnan()


def parts_of(name: str, tensor: Tensor) -> Iterator[Named]:
    """`tensor` by its name without PEFT's prefixes; of stacked experts a view of each one's
    weights.
    """
    name = PREFIX.sub("", name)
    tensor = tensor.detach()
    parent, _, leaf = name.rpartition(".")
    if not (parent.endswith(".experts") and leaf in STACKED):
        yield name, tensor
        return
    leaves = EXPERT_PARTS[STACKED[leaf]]
    for expert, stacked in enumerate(tensor):
        for part_name, part in zip(leaves, stacked.chunk(len(leaves)), strict=True):
            yield f"{parent}.{expert}.{part_name}.weight", part


def factor_of(values: Tensor, sent: Tensor) -> float | None:
    """Returns what all of `sent` was multiplied by, where `values` are that and it is not nearly 1.

    >>> factor_of(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0]))
    2.0
    """
    epsilon = torch.finfo(values.dtype).eps
    known = ~sent.isnan()
    values = values[known].double()
    sent = sent[known].double()
    factor = (values @ sent / (sent @ sent)).item()
    is_that = torch.allclose(values, factor * sent, rtol=2 * epsilon, atol=0.0)
    return factor if is_that and abs(factor - 1) > 4 * epsilon else None


def variance_of_rounding(weight: Tensor, update: Tensor, epsilon: float) -> Tensor:
    """Returns by element the variance of base + update, which lies p of the way between two steps
    of a grid and is rounded to them without bias: p (1 - p) spacing^2. weight: the sum, rounded.
    """
    spacing = torch.exp2(torch.floor(torch.log2(weight.abs()))) * epsilon
    rest = update.abs().remainder(spacing)
    return (rest * (spacing - rest)).nan_to_num()


def share_of(product: float, square: float, variance: float) -> dict[str, float]:
    """Returns the share <M, U> / <U, U> of an update that arrived, `arrived`, and its standard
    error, `arrived_error`; nothing without an update.
    """
    if not square:
        return {}
    return {"arrived": product / square, "arrived_error": math.sqrt(variance) / square}


def _elements(tensor: Tensor, index: Tensor) -> Tensor:
    """Copies those at `index` [elements, dimensions] to the CPU."""
    return tensor[tuple(index.to(tensor.device).T)].to("cpu", copy=True)


def scaled_adapters(
    tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]
) -> Iterator[Named]:
    """(name, tensor) of PEFT's adapters, with (alpha / r) in B, as vLLM serves them."""
    rank = peft_config["r"]
    root = math.sqrt(rank) if peft_config.get("use_rslora") else rank
    scaling = peft_config["lora_alpha"] / root
    for name, tensor in tensors.items():
        yield name, tensor * scaling if ".lora_B." in name else tensor


@lru_cache(maxsize=256)
def positions(shape: torch.Size, elements: int, number: int = 1) -> Tensor:
    """Indices [noted, dimensions] of three samples of `elements`: one that depends on the shape
    alone, that of the sync `number` and that of the sync after it; of all elements if there are no
    more than `elements`, or these are 0.

    >>> positions(torch.Size([2, 2]), 0).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    total = math.prod(shape)
    if 0 < elements < total:
        samples = []
        for each in (0, number, number + 1):
            seed = (total + each * 2654435761) % 2**32  # torch drops the bits above
            generator = torch.Generator().manual_seed(seed)
            samples.append(torch.randint(total, (elements,), generator=generator))
        flat = torch.cat(samples)
    else:
        flat = torch.arange(total)
    return torch.stack(torch.unravel_index(flat, shape), dim=1)


def syncs_to_see(fault: int, total: int, elements: int) -> int:
    """Returns how many syncs it takes to see with 99 % a fault that stays, of `fault` elements of a
    tensor's `total`, of which each sync samples `elements` anew (0: all).

    A block of 128 x 128 in a matrix of 2048 x 2048:

    >>> syncs_to_see(128 * 128, 2048 * 2048, 64)
    19
    """
    if not 0 < elements < total or fault >= total:
        return 1
    missed = elements * math.log1p(-fault / total)  # log of the probability, in one sync
    return math.ceil(math.log(0.01) / missed)
