"""Recorded routes in the place of a trainer's own choice, for megatron-core's routers, patched by
others or not.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .routes import Routers


@dataclass(frozen=True)
class MicroBatch:
    """The routes of one forward pass, a row for each token in the order in which routers see them,
    position by position. Tensor parallel ranks all have all of them.

    Attributes:
        routes: [rows, layers, top_k], integers.
        known: bool [rows], False where a token keeps the trainer's own choice: padding, and a
            sequence's last token.
        chosen: what each of this rank's layers computed with, int64 [rows or this rank's share of
            them, top_k].
    """

    routes: Tensor
    known: Tensor
    chosen: dict[int, Tensor] = field(default_factory=dict)


class Counts(NamedTuple):
    """Counts, of one layer, the rows that were sent where they were recorded, rows that chose for
    themselves, and how many of the recorded choices the trainer would have made otherwise.
    """

    replayed: int = 0
    native: int = 0
    flipped: int = 0


class _OtherTopK(TorchFunctionMode):
    """torch.topk over experts answers with other experts, and their scores. So each router computes
    all the rest by itself: its scores, its normalisation, its gradients. asked: how often it was.
    """

    def __init__(self, choose: Callable[[Tensor], Tensor]):
        super().__init__()
        self.choose = choose
        self.asked = 0

    def __torch_function__(
        self, function: Callable, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        result = function(*arguments, **named or {})
        if function not in (torch.topk, Tensor.topk):
            return result
        self.asked += 1
        scores = arguments[0]
        ids = self.choose(result.indices)
        return torch.return_types.topk((scores.gather(1, ids), ids))


class RouteReplay:
    """The routers of a rank's part of the model. They choose by themselves, but for the
    micro-batches of a pass.

    Args:
        model: its routers are megatron-core's TopKRouter, whoever patched it: this goes on each
            object, last.
        tp_rank, tp_size: tensor parallel ranks decide for a share of the rows each (sequence
            parallelism), or each for all (dispatcher alltoall_seq).
    """

    micro: MicroBatch | None = None  # of the forward pass under way
    # of layers that are computed again, oldest first
    again: dict[int, deque[MicroBatch]] | None = None

    def __init__(self, model: nn.Module, routers: Routers, tp_rank: int = 0, tp_size: int = 1):
        from megatron.core.transformer.moe.router import TopKRouter

        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.index: dict[int, int] = {}  # among `routers.layers`, of each layer of this rank
        self.seen: dict[int, Tensor] = {}  # of each layer, what `counts` returns
        for router in model.modules():
            if not isinstance(router, TopKRouter):
                continue
            layer = router.layer_number - 1  # Megatron counts from 1, over all stages
            if layer not in routers.layers or layer in self.index:
                raise RuntimeError(
                    f"the model has a router in layer {layer}, which by config.json has none or "
                    f"has one already: those with one are {list(routers.layers)}"
                )
            self.index[layer] = routers.layers.index(layer)
            router.routing = partial(self._routing, layer, router.routing)
        if not self.index:
            raise RuntimeError(
                "no router was found in this rank's part of the model: routes cannot be replayed. "
                "algorithm.routing_replay=none goes without"
            )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Forward and backward passes over micro-batches, which are counted. RuntimeError after
        them unless each layer that kept only its input was computed again.
        """
        self.again = {layer: deque() for layer in self.index}
        yield
        left = {layer: len(queue) for layer, queue in self.again.items() if queue}
        self.again = None
        if left:
            raise RuntimeError(
                "layers were to be computed again for their gradient and were not; routes that are "
                f"left, by layer: {left}"
            )

    def counts(self) -> dict[int, Counts]:
        """Returns those of each `training` since the last call together, by layer: those rows that
        this rank answers for.
        """
        counts = {layer: Counts(*seen.tolist()) for layer, seen in self.seen.items()}
        self.seen.clear()
        return counts

    @contextmanager
    def forward(self, micro: MicroBatch) -> Iterator[None]:
        """The forward pass of one micro-batch. RuntimeError after it unless each layer chose
        experts once.
        """
        self.micro = micro
        try:
            yield
        finally:
            self.micro = None
        if missing := self.index.keys() - micro.chosen.keys():
            raise RuntimeError(
                f"layer {min(missing)} chose no experts in a forward pass, so nothing was replayed "
                "there: another model computes than the one that has the routes"
            )

    def _routing(self, layer: int, routing: Callable, logits: Tensor) -> Any:
        """Calls `routing` of one router with the routes of the micro-batch in it."""
        micro = self.micro
        if micro is None:
            if self.again is None:  # a pass without routes: the reference's
                return routing(logits)
            if not self.again[layer]:
                raise RuntimeError(
                    f"layer {layer} is computed again, and no routes are left for it"
                )
            micro = self.again[layer].popleft()
        elif layer in micro.chosen:
            raise RuntimeError(f"layer {layer} chose experts twice in one forward pass")
        with _OtherTopK(partial(self._chosen, layer, micro)) as other:
            result = routing(logits)
        if other.asked != 1:
            raise RuntimeError(
                f"the router of layer {layer} took the largest of its scores {other.asked} times, "
                "not once: its routes cannot be replayed. algorithm.routing_replay=none goes "
                "without"
            )
        return result

    def _chosen(self, layer: int, micro: MicroBatch, own: Tensor) -> Tensor:
        """Ids [rows, top_k] of the experts that tokens go to; `own` are those that the router would
        choose.
        """
        if layer in micro.chosen:  # it is computed again
            return micro.chosen[layer]
        rows = len(micro.known)
        start, end = (rows * rank // self.tp_size for rank in (self.tp_rank, self.tp_rank + 1))
        share = slice(start, end)
        # a rank decides for all rows and counts its share, or decides for that alone
        decided = slice(None) if len(own) == rows else share
        counted = share if len(own) == rows else slice(None)
        known = micro.known[decided]
        if len(own) != len(known):
            raise RuntimeError(
                f"layer {layer} chooses experts for {len(own)} tokens, and there are routes for "
                f"{rows}"
            )
        recorded = micro.routes[decided, self.index[layer]].to(own)
        common = (recorded[:, :, None] == own[:, None, :]).any(-1)
        # of the same experts the trainer's order stays, and with it every bit of its result
        ids = torch.where((known & ~common.all(-1))[:, None], recorded, own)
        known = known[counted]
        flipped = ~common[counted] & known[:, None]
        micro.chosen[layer] = ids
        if self.again is not None:
            seen = torch.stack([known.sum(), (~known).sum(), flipped.sum()])
            self.seen[layer] = self.seen.get(layer, 0) + seen
            if not torch.is_grad_enabled():
                self.again[layer].append(micro)
        return ids


def total(counts: Iterable[Mapping[int, Counts]]) -> dict[int, Counts]:
    """Adds up those of several passes or ranks together, by layer; Counts() of others.

    >>> total([{0: Counts(3, 1, 2), 1: Counts(3, 1, 0)}, {0: Counts(2, 0, 1)}])[0]
    Counts(replayed=5, native=1, flipped=3)
    """
    summed: dict[int, Counts] = defaultdict(Counts)
    for part in counts:
        for layer, of_part in part.items():
            summed[layer] = Counts(*map(add, summed[layer], of_part))
    return summed


def routing_metrics(counts: Mapping[int, Counts], routers: Routers) -> dict[str, float]:
    """Summarizes the updates of one iteration, of all ranks: tokens that were replayed and that
    chose for themselves, and the share of choices, of top_k a token, that the trainer would have
    made otherwise, in all and by layer. RuntimeError that names a layer where other tokens were
    replayed than in the first one. counts: of `total`.

    >>> routers = Routers((0, 1), experts=8, top_k=2)
    >>> routing_metrics(total([{0: Counts(3, 1, 3), 1: Counts(3, 1, 0)}]), routers)
    {'routing/replayed_tokens': 3, 'routing/native_tokens': 1, 'routing/flipped': 0.25, \
'routing/flipped/layer_0': 0.5, 'routing/flipped/layer_1': 0.0}
    """
    first = counts[routers.layers[0]]
    choices = first.replayed * routers.top_k or math.nan
    shares = {}
    for layer in routers.layers:
        of_layer = counts[layer]
        shares[f"routing/flipped/layer_{layer}"] = of_layer.flipped / choices
        if (of_layer.replayed, of_layer.native) != (first.replayed, first.native):
            raise RuntimeError(
                f"layer {layer} replayed {of_layer.replayed} tokens and left {of_layer.native} to "
                f"the trainer, layer {routers.layers[0]} {first.replayed} and {first.native}"
            )
    return {
        "routing/replayed_tokens": first.replayed,
        "routing/native_tokens": first.native,
        "routing/flipped": sum(shares.values()) / len(shares),
        **shares,
    }
