"""What vLLM's routers choose, sorted by request and position. vLLM is not imported: a recorder is
told what its model runner computes, and its own routers, or those of a plugin, hand over their
choices.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .routes import Routers, answer_of


class RouteRecorder:
    """The routes of the requests that a model runner serves while `recording`.

    A row of a forward pass belongs to a request by the runner's batch, and to a position by how
    many of its tokens are computed already; so a prompt that comes in chunks lies where it belongs,
    and a request that was preempted and is computed again has the routes of the last time, which
    are those of the keys and values that it went on with.

    Args:
        runner: vLLM's model runner, v1 (vllm/v1/worker/gpu_model_runner.py;
            vllm_ascend/worker/model_runner_v1.py).
        max_len: most tokens of a request.
    """

    def __init__(self, runner: Any, routers: Routers, max_len: int):
        self.runner = runner
        self.routers = routers
        self.max_len = max_len
        # int16 for more than 256 experts: torch has few operators for uint16
        self.on_device = torch.uint8 if routers.dtype == np.uint8 else torch.int16
        self._forget()
        # of the forward pass under way, by layer
        self.chosen: dict[int, Tensor] | None = None
        # of it: each request's first position, in the order of the rows
        self.starts: dict[str, int] = {}
        self.is_recording = False

    def _forget(self) -> None:
        shape = (self.max_len, len(self.routers.layers), self.routers.top_k)
        # of a request [max_len, layers, top_k]
        self.routes: dict[str, np.ndarray] = defaultdict(
            partial(np.zeros, shape, self.routers.dtype)
        )
        # of a request bool [max_len]: positions that were computed
        self.known: dict[str, np.ndarray] = defaultdict(partial(np.zeros, self.max_len, bool))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it holds, everything that is scheduled is recorded; passes that nobody asked for
        (profiling, a dummy batch) are not.
        """
        self._forget()
        self.is_recording = True
        execute_model = self.runner.execute_model

        def recorded(scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
            self.chosen = {}
            scheduled = scheduler_output.num_scheduled_tokens
            try:
                result = execute_model(scheduler_output, *arguments, **more)
                if scheduled:
                    self._sort(scheduled)
            finally:
                self.chosen = None
            return result

        self.runner.execute_model = recorded
        try:
            yield
        finally:
            del self.runner.execute_model  # the class's own is there again
            self.is_recording = False

    def capture(self, layer: int, ids: Tensor) -> None:
        """Take what the router of `layer`, counted over the whole model, chose: ids of experts
        [rows, top_k], a row for each token of this pass in the runner's order; more rows are
        padding.
        """
        if self.chosen is None:
            return
        if layer in self.chosen:
            raise RuntimeError(
                f"layer {layer} chose experts twice in one forward pass: its routes cannot be "
                "recorded"
            )
        if not self.chosen:  # the batch is complete by now, and not yet changed for the next pass
            batch = self.runner.input_batch
            self.starts = {
                request: int(batch.num_computed_tokens_cpu[row])
                for row, request in enumerate(batch.req_ids)
            }
        self.chosen[layer] = ids.to(self.on_device)  # a copy: ids may be overwritten

    def own_rows(self, ids: Tensor) -> Tensor:
        """Returns what the layers chose [rows, layers, top_k] as rows in the runner's order: as
        they are, for an engine whose routers see them so.
        """
        return ids

    def _sort(self, scheduled: dict[str, int]) -> None:
        """Put the rows of a forward pass where they belong."""
        chosen = self.chosen or {}
        tokens = sum(scheduled.values())
        if missing := [layer for layer in self.routers.layers if layer not in chosen]:
            raise RuntimeError(
                f"layer {missing[0]} chose no experts in a forward pass of {tokens} tokens, "
                f"{len(chosen)} of {len(self.routers.layers)} layers did: routes cannot be "
                "recorded on this engine. "
                "algorithm.routing_replay=none goes without"
            )
        ids = self.own_rows(torch.stack([chosen[layer] for layer in self.routers.layers], dim=1))
        ids = ids.cpu().numpy().view(self.routers.dtype)
        end = 0
        if len(ids) < tokens:
            raise RuntimeError(
                f"routers chose experts for {len(ids)} tokens of {tokens}: the "
                "rest is on another rank, and nobody gathered it"
            )
        for request, position in self.starts.items():
            start = end
            end += scheduled.get(request, 0)
            where = slice(position, position + end - start)
            self.routes[request][where] = ids[start:end]
            self.known[request][where] = True

    def take(self, outputs: Sequence[Any]) -> list[list[np.ndarray]]:
        """Per output of vLLM, for each of its answers, the routes [tokens, layers, top_k] of its
        prompt and its tokens, but for the last one, which nobody computed. RuntimeError that names
        the request whose positions were not all computed (its prompt's from a prefix cache?).
        """
        by_answer = {answer_of(request): request for request in self.routes}
        routes: list[list[np.ndarray]] = []
        for output in outputs:
            routes.append([])
            for answer in output.outputs:
                request = by_answer.get((output.request_id, answer.index), "")
                tokens = len(output.prompt_token_ids) + max(len(answer.token_ids) - 1, 0)
                known = self.known[request][:tokens]
                if not known.all():
                    raise RuntimeError(
                        f"request {output.request_id}, answer {answer.index}: no routes for "
                        f"{np.sum(~known)} of its {tokens} tokens, the first at position "
                        f"{np.argmin(known)}. Were they read from a prefix cache, or was the "
                        "request aborted?"
                    )
                routes[-1].append(self.routes[request][:tokens].copy())
        return routes
