"""Routing replay (docs/routing_replay.md) in the transfer dock and in upstream's training passes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mindspeed_rl.utils.compute import get_parallel_state

from mindspeed_qerl.families import read_shape
from mindspeed_qerl.recipe.types import Recipe
from mindspeed_qerl.routing.replay import Counts, MicroBatch, RouteReplay, total
from mindspeed_qerl.routing.routes import Routers

COLUMN = "routes"  # of the transfer dock, a row `pack` for each answer


def pack(routes: np.ndarray) -> torch.Tensor:
    """One answer's routes [tokens, layers, top_k] as a row of the transfer dock: int32 [3 + a
    quarter of their bytes], their shape before them. Upstream sends columns of another type on as
    float32 (base_worker.py, `broadcast_data_hccl`), and fills rows up with the padding token, which
    uint8 cannot hold.
    """
    content = np.ascontiguousarray(routes).tobytes()
    content += bytes(-len(content) % 4)
    return torch.from_numpy(
        np.concatenate([np.array(routes.shape, np.int32), np.frombuffer(content, np.int32)])
    )


def unpack(row: torch.Tensor, routers: Routers) -> np.ndarray:
    """What `pack` was given; `row` may be longer. ValueError: it holds less than the shape that it
    names.
    """
    row = row.cpu().numpy()
    shape, content = row[:3], row[3:].tobytes()
    size = int(shape.prod(dtype=np.int64)) * routers.dtype.itemsize
    if (shape < 0).any() or size > len(content):
        raise ValueError(f"its routes have {len(content)} bytes for the shape {shape.tolist()}")
    return np.frombuffer(content[:size], routers.dtype).reshape(shape)


class RoutedPasses:
    """Upstream's passes over micro-batches on this rank, with the routes of the column `COLUMN` in
    its routers; or, where a pass before the update has none, with its own ones kept for the update.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe):
        state = get_parallel_state()
        self.recipe, self.routers = recipe, read_shape(recipe.model.path).routers
        self.pp_group = state.get_pipeline_model_parallel_group()
        self.replay = RouteReplay(
            model,
            self.routers,
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
        )
        self.counts: list[dict[int, Counts]] = []  # of each update since `take_counts`
        self.recorded: list[
            torch.Tensor
        ] = []  # of the answers of the last pass before the update, as in the dock

    def around(self, forward_backward: Callable) -> Callable:
        """Megatron's schedule (pipeline_parallel/schedules.py) for these passes."""

        def run(*, forward_step_func: Callable, forward_only: bool, **arguments: Any) -> Any:
            passed: list[tuple[dict[str, torch.Tensor], MicroBatch]] = []

            def step(batches: Any, model: torch.nn.Module) -> Any:
                batch = next(batches)
                passed.append((batch, self._micro_batch(batch)))
                with self.replay.forward(passed[-1][1]):
                    return forward_step_func(iter([batch]), model)

            with nullcontext() if forward_only else self.replay.training():
                result = forward_backward(
                    forward_step_func=step, forward_only=forward_only, **arguments
                )
            if not forward_only:
                self.counts.append(self.replay.counts())
            elif self.recipe.algorithm.routing_replay == "record":
                self.recorded = [
                    row for batch, micro in passed for row in self._rows_of(batch, micro)
                ]
            return result

        return run

    def take_counts(self) -> dict[int, Counts]:
        """Of all updates since the last call, by layer of this rank."""
        counts, self.counts = self.counts, []
        return total(counts)

    def _micro_batch(self, batch: dict[str, torch.Tensor]) -> MicroBatch:
        """Megatron has tokens position by position; upstream pads prompt and answer on the right."""
        answers, width = batch["input_ids"].shape
        lengths = (batch["prompt_length"] + batch["response_length"]).flatten()
        known = torch.arange(width, device=lengths.device)[:, None] < lengths - 1
        if COLUMN not in batch:
            return MicroBatch(None, known.flatten())
        routes = np.zeros(
            (width, answers, len(self.routers.layers), self.routers.top_k), dtype=np.int32
        )
        for answer, row in enumerate(batch[COLUMN]):
            of_answer = unpack(row, self.routers)
            if len(of_answer) != lengths[answer] - 1:
                raise RuntimeError(
                    f"an answer of {lengths[answer]} tokens came with the routes of "
                    f"{len(of_answer)}, not of all but its last: rows of the transfer dock were "
                    "mixed up"
                )
            routes[: len(of_answer), answer] = of_answer
        return MicroBatch(
            torch.from_numpy(routes).flatten(0, 1).to(lengths.device), known.flatten()
        )

    def _rows_of(self, batch: dict[str, torch.Tensor], micro: MicroBatch) -> list[torch.Tensor]:
        """For each answer of a micro-batch, what all stages' routers chose."""
        answers, width = batch["input_ids"].shape
        found = torch.zeros(
            width,
            answers,
            len(self.routers.layers),
            self.routers.top_k,
            dtype=torch.int32,
            device=micro.known.device,
        )
        for layer, chosen in micro.chosen.items():
            found[:, :, self.replay.index[layer]] = chosen.view(width, answers, -1).int()
        dist.all_reduce(found, group=self.pp_group)  # each layer is on one stage
        lengths = (batch["prompt_length"] + batch["response_length"]).flatten().tolist()
        whole = found.cpu().numpy().astype(self.routers.dtype)
        return [pack(whole[: length - 1, answer]) for answer, length in enumerate(lengths)]
