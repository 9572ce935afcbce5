"""Whose draw of the noise the requests of somebody else's trainer have: nobody tells vLLM, so a
worker goes by the requests themselves.
"""

import hashlib
import os
from typing import Any

import torch

from mindspeed_qerl.aqn.rows import NoiseOfRows

ENGINES_APART = 1 << 32  # more draws than an engine has answers


class RequestDraws:
    """Draws of the requests that one vLLM worker serves, the same in all ranks of an engine.

    An answer's comes from its request's id, which no request of another engine has. With an
    external launcher each rank makes up ids of its own: there it comes from the request's place in
    their order, which is the same when a run is repeated. A group's comes from its prompt's tokens,
    since a group may be spread over several engines.

    Args:
        draws: "group" or "answer".

    Raises:
        ValueError: vLLM would give a prompt's keys and values to another draw, computes what was
            compiled or captured without the noise, or has another model runner.
    """

    def __init__(self, worker: Any, draws: str):
        config = worker.vllm_config
        if config.cache_config.enable_prefix_caching or not config.model_config.enforce_eager:
            raise ValueError(
                f"draws = {draws!r} needs vLLM with enable_prefix_caching=False and "
                "enforce_eager=True: cached prompts belong to one draw, and what is compiled or "
                "captured multiplies with one weight. Or take draws = 'step'"
            )
        if not hasattr(worker.model_runner, "_prepare_inputs"):
            raise ValueError(
                f"draws = {draws!r} needs vLLM's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0. "
                "Or take draws = 'step'"
            )
        self.draws = draws
        self.first: int | None = None  # draw of this engine, if they follow each other
        parallel = config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            engine_ranks = parallel.world_size // parallel.data_parallel_size
            self.first = 1 + ENGINES_APART * (int(os.environ["RANK"]) // engine_ranks)
        self.step: int | None = None
        self.numbers: dict[str, int] = {}  # draws of this step's requests

    @torch.no_grad()
    def begin(self, rows: NoiseOfRows, step: int) -> None:
        """Makes this what says whose draw a row has. In a step that goes on, after a further sync,
        say, requests have further draws.

        Raises:
            ValueError: a norm that does not multiply by its weight, as those by 1 + weight.
        """
        for norm in rows.norms:
            ones = torch.ones_like(norm.weight)
            if not torch.allclose(norm(ones[None])[0], norm.weight, rtol=0.01, atol=0.01):
                raise ValueError(
                    f"draws = {self.draws!r} needs norms that multiply by their weight, and "
                    f"{type(norm).__name__} does something else: take draws = 'step'"
                )
        if step != self.step:
            self.step = step
            self.numbers.clear()
        rows.draw_of = self.of

    def of(self, request: Any) -> int:
        """Returns the draw of a request of vLLM's model runner."""
        if request.req_id not in self.numbers:
            self.numbers[request.req_id] = self._number(request)
        return self.numbers[request.req_id]

    def _number(self, request: Any) -> int:
        if self.draws == "answer" and self.first is not None:
            return self.first + len(self.numbers)
        key = request.req_id if self.draws == "answer" else repr(list(request.prompt_token_ids))
        digest = hashlib.sha256(key.encode()).digest()
        return 1 + int.from_bytes(digest[:6], "big")
