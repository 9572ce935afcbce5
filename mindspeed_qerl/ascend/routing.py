"""Routing replay (docs/routing_replay.md) in the transfer dock and upstream's training passes."""

from collections.abc import Callable

import numpy as np
import torch
from mindspeed_rl.utils.compute import get_parallel_state
from torch import Tensor

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.replay import MicroBatch, RouteReplay
from mindspeed_qerl.routing.routes import Routers, routes_fault

COLUMN = "routes"  # of the transfer dock, a row `pack` for each answer


def pack(routes: np.ndarray) -> Tensor:
    """One answer's routes [tokens, layers, top_k] as a row of the transfer dock: int32 [3 + a
    quarter of their bytes], their shape before them. Upstream sends columns of another type on as
    float32 (base_worker.py, `broadcast_data_hccl`), and fills rows up with the padding token, which
    uint8 cannot hold.
    """
    content = np.ascontiguousarray(routes).tobytes()
    content += bytes(-len(content) % 4)
    shape = np.array(routes.shape, np.int32)
    return torch.from_numpy(np.concatenate([shape, np.frombuffer(content, np.int32)]))


def unpack(row: Tensor, routers: Routers) -> np.ndarray:
    """Returns what `pack` was given; `row` may be longer. ValueError: it is not of `pack`."""
    row = row.cpu().numpy()
    shape = row[:3]
    return np.frombuffer(row[3:].tobytes(), routers.dtype, shape.prod(dtype=int)).reshape(shape)


def row_fault(row: Tensor, tokens: int, routers: Routers) -> str | None:
    """`routes_fault` of a row of the dock."""
    try:
        return routes_fault(unpack(row, routers), tokens, routers)
    except ValueError as error:
        return str(error)


class RoutedPasses:
    """Makes this rank's routers follow the routes of the column `COLUMN` in upstream's passes over
    micro-batches.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe):
        state = get_parallel_state()
        self.routers = read_shape(recipe.model.path).routers
        self.is_packed = recipe.batch.use_remove_padding
        self.replay = RouteReplay(
            model,
            self.routers,
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        )

    def around(self, forward_backward: Callable) -> Callable:
        """Megatron's schedule (pipeline_parallel/schedules.py) for these passes."""

        def run(*, forward_step_func, data_iterator, forward_only, **arguments):
            batches = list(data_iterator)
            # before the passes: the host waits for lengths and routes
            routed = zip(batches, [self._micro_batch(batch) for batch in batches])

            def step(micro_batches, model):
                batch, micro_batch = next(micro_batches)
                with self.replay.forward(micro_batch):
                    return forward_step_func(iter([batch]), model)

            arguments |= {
                "forward_step_func": step,
                "data_iterator": routed,
                "forward_only": forward_only,
            }
            if forward_only:
                return forward_backward(**arguments)
            with self.replay.training():
                return forward_backward(**arguments)

        return run

    def _micro_batch(self, batch: dict[str, Tensor]) -> MicroBatch:
        """Megatron has tokens position by position; upstream pads whole answers on the right. Or it
        has answer after answer, each padded to a multiple of TP (remove_padding.py:45).
        """
        device = batch["input_ids"].device
        width = batch["input_ids"].shape[1]
        lengths = (batch["prompt_length"] + batch["response_length"]).flatten().tolist()
        answers = []
        for row, length in zip(batch[COLUMN], lengths):
            if self.is_packed:
                width = length + -length % self.replay.tp_size
            # the last token goes through no model
            padding = width - (length - 1)
            recorded = unpack(row, self.routers).astype(np.int32)
            answers.append(np.pad(recorded, ((0, padding), (0, 0), (0, 0)), constant_values=-1))
        # of sequences of one length their first rows, then their second ones, ...
        ordered = answers if self.is_packed else np.stack(answers, axis=1)
        routes = torch.from_numpy(np.concatenate(ordered)).to(device)
        return MicroBatch(routes, known=routes[:, 0, 0] >= 0)
