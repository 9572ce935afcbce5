"""Routing replay (docs/routing_replay.md) in the transfer dock and upstream's training passes."""

from collections.abc import Callable

import numpy as np
import torch
from mindspeed_rl.utils.compute import get_parallel_state

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.replay import Counts, MicroBatch, RouteReplay, total
from mindspeed_qerl.routing.routes import Routers, routes_fault

COLUMN = "routes"  # of the transfer dock, a row `pack` for each answer


def pack(routes: np.ndarray) -> torch.Tensor:
    """One answer's routes [tokens, layers, top_k] as a row of the transfer dock: int32 [3 + a
    quarter of their bytes], their shape before them. Upstream sends columns of another type on as
    float32 (base_worker.py, `broadcast_data_hccl`), and fills rows up with the padding token, which
    uint8 cannot hold.
    """
    content = np.ascontiguousarray(routes).tobytes()
    content += bytes(-len(content) % 4)
    shape = np.array(routes.shape, np.int32)
    return torch.from_numpy(np.concatenate([shape, np.frombuffer(content, np.int32)]))


def unpack(row: torch.Tensor, routers: Routers) -> np.ndarray:
    """What `pack` was given; `row` may be longer. ValueError: it is not of `pack`."""
    row = row.cpu().numpy()
    shape, content = row[:3], row[3:].tobytes()
    return np.frombuffer(content, routers.dtype, shape.prod(dtype=int)).reshape(shape)


def row_fault(row: torch.Tensor, tokens: int, routers: Routers) -> str | None:
    """`routes_fault` of a row of the dock."""
    try:
        return routes_fault(unpack(row, routers), tokens, routers)
    except ValueError as error:
        return str(error)


class RoutedPasses:
    """Upstream's passes over micro-batches on this rank, with the routes of the column `COLUMN` in
    its routers. counts: of each update since `take_counts`.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe):
        state = get_parallel_state()
        self.routers = read_shape(recipe.model.path).routers
        self.replay = RouteReplay(
            model,
            self.routers,
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        )
        self.counts: list[dict[int, Counts]] = []

    def around(self, forward_backward: Callable) -> Callable:
        """Megatron's schedule (pipeline_parallel/schedules.py) for these passes."""

        def run(*, forward_step_func, forward_only, **arguments):
            def step(batches, model):
                batch = next(batches)
                with self.replay.forward(self._micro_batch(batch)):
                    return forward_step_func(iter([batch]), model)

            arguments |= {"forward_step_func": step, "forward_only": forward_only}
            if forward_only:
                return forward_backward(**arguments)
            with self.replay.training():
                result = forward_backward(**arguments)
            self.counts.append(self.replay.counts())
            return result

        return run

    def take_counts(self) -> dict[int, Counts]:
        """Of all updates since the last call, by layer of this rank."""
        counts, self.counts = self.counts, []
        return total(counts)

    def _micro_batch(self, batch: dict[str, torch.Tensor]) -> MicroBatch:
        """Megatron has tokens position by position; upstream pads whole answers on the right."""
        answers, width = batch["input_ids"].shape
        # an answer's last token goes through no model
        computed = (batch["prompt_length"] + batch["response_length"]).flatten() - 1
        places = torch.arange(width, device=computed.device)
        known = (places[:, None] < computed).flatten()
        layers, top_k = len(self.routers.layers), self.routers.top_k
        routes = np.zeros((width, answers, layers, top_k), dtype=np.int32)
        for answer, (row, tokens) in enumerate(zip(batch[COLUMN], computed.tolist())):
            routes[:tokens, answer] = unpack(row, self.routers)
        return MicroBatch(torch.from_numpy(routes).flatten(0, 1).to(known.device), known)
