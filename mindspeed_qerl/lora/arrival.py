"""Did the weights arrive? What a trainer sent, element by element of a sample, beside what a
rollout engine computes with (held.py).
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mindspeed_qerl.lora.held import EXPERT_PARTS, Held

# as transformers 5 stacks experts -> as vLLM stacks them
STACKED = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PREFIX = re.compile(r"^(base_model\.model\.)?|\.base_layer(?=\.)")  # of PEFT


@dataclass(frozen=True)
class Sample:
    """Elements of a whole tensor. values: as sent; index: [elements, dimensions]."""

    values: torch.Tensor
    index: torch.Tensor
    shape: torch.Size


@dataclass(frozen=True)
class Failure:
    """A tensor that did not arrive, and in which way."""

    name: str
    problem: str


class Arrival:
    """What was sent in this sync and in the one before it.

    Args:
        elements: of each tensor, that are compared; 0: all of them.
        tolerance: differences that are still equal, in units of the rounding of the tensor's
            largest sampled value; 0: bits. More where the sender rounds elsewhere than we do.
    """

    def __init__(self, elements: int = 64, tolerance: float = 0.0):
        self.elements, self.tolerance = elements, tolerance
        self.sent: dict[str, Sample] = {}
        self.before: dict[str, Sample] = {}

    def begin(self) -> None:
        """A new sync starts."""
        if self.sent:
            self.before, self.sent = self.sent, {}

    def expect(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is sent under a name of transformers, of PEFT, or of stacked experts."""
        name = PREFIX.sub("", name)
        parent, _, leaf = name.rpartition(".")
        if parent.endswith(".experts") and leaf in STACKED:
            leaves = EXPERT_PARTS[STACKED[leaf]]
            for expert, stacked in enumerate(tensor):
                for part_name, part in zip(leaves, stacked.chunk(len(leaves)), strict=True):
                    self.expect(f"{parent}.{expert}.{part_name}.weight", part)
            return
        tensor = tensor.detach()
        index = positions(tensor.shape, self.elements)
        values = tensor[tuple(index.to(tensor.device).T)].to("cpu", copy=True)
        self.sent[name] = Sample(values, index, tensor.shape)

    @property
    def unchanged(self) -> bool:
        """Whether all that was sent is what the sync before had sent."""
        if not self.before or self.sent.keys() != self.before.keys():
            return False
        pairs = ((sample, self.before[name]) for name, sample in self.sent.items())
        return all(torch.equal(sample.values, before.values) for sample, before in pairs)

    def failures(self, held: Iterable[Held]) -> list[Failure]:
        """What is not there as it was sent, or is there and was never sent for.

        >>> arrival = Arrival()
        >>> arrival.expect("up.weight", torch.eye(2))
        >>> arrival.failures([Held("up.weight", torch.zeros(2, 2), (0, 0))])
        [Failure(name='up.weight', problem='all of it is 0')]
        """
        failures, names = [], set()
        for part in held:
            names.add(part.name)
            problem = self._problem(part)
            if problem:
                failures.append(Failure(part.name, problem))
        for name in self.sent.keys() - names:
            if not _is_elsewhere(name, names):
                failures.append(Failure(name, "no module of the rollout model has it"))
        return sorted(failures, key=lambda failure: failure.name)

    def _problem(self, held: Held) -> str | None:
        sample = self.sent.get(held.name)
        if sample is None:
            return None
        start = torch.tensor(held.start)
        place = sample.index - start
        inside = ((place >= 0) & (place < torch.tensor(held.part.shape))).all(1)
        if not inside.any():
            return None
        place = place[inside]
        values = held.part[tuple(place.to(held.part.device).T)].cpu()
        if self._equal(values, sample.values[inside]):
            return None
        if values.isnan().any():
            return "it has NaN"
        if not held.part.any():
            return "all of it is 0"
        before = self.before.get(held.name)
        if before and self._equal(values, before.values[inside]):
            return "it is still what the sync before had sent"
        if held.part.dim() == 2 and held.part.shape == sample.shape == held.part.shape[::-1]:
            mirrored = held.part[tuple(place.flip(1).to(held.part.device).T)].cpu()
            if self._equal(mirrored, sample.values[inside]):
                return "it is transposed"
        for name, other in self.sent.items():
            if other.shape == sample.shape and self._equal(values, other.values[inside]):
                return f"it is {name}"
        wrong = values != sample.values[inside].to(values.dtype)
        return f"{int(wrong.sum())} of {len(values)} sampled elements differ"

    def _equal(self, values: torch.Tensor, sent: torch.Tensor) -> bool:
        """Whether `values` are those that were sent, rounded to their dtype."""
        sent = sent.to(values.dtype)
        if not self.tolerance:
            return torch.equal(values, sent)
        largest = sent.float().abs().max().item()
        allowed = self.tolerance * torch.finfo(values.dtype).eps * largest
        return bool(((values.float() - sent.float()).abs() <= allowed).all())


def scaled_adapters(
    tensors: Mapping[str, torch.Tensor], peft_config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of PEFT's adapters, with (alpha / r) in B, as vLLM serves them."""
    rank = peft_config["r"]
    root = math.sqrt(rank) if peft_config.get("use_rslora") else rank
    scaling = peft_config["lora_alpha"] / root
    for name, tensor in tensors.items():
        yield name, tensor * scaling if ".lora_B." in name else tensor


@cache
def positions(shape: torch.Size, elements: int) -> torch.Tensor:
    """Indices [elements, dimensions] of a sample that depends on the shape alone; of all elements
    if there are no more, or `elements` is 0.

    >>> positions(torch.Size([2, 2]), 0).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    total = math.prod(shape)
    if 0 < elements < total:
        flat = torch.randint(total, (elements,), generator=torch.Generator().manual_seed(total))
    else:
        flat = torch.arange(total)
    return torch.stack(torch.unravel_index(flat, shape), dim=1)


def _is_elsewhere(name: str, held: set[str]) -> bool:
    """Whether another worker may hold it: an expert, where this one holds others of its layer; or
    an output layer that is the embedding.
    """
    if name == "lm_head.weight":
        return True
    layer, experts, _ = name.partition(".experts.")
    return bool(experts) and any(other.startswith(f"{layer}.experts.") for other in held)
