"""Whose draw of the noise the requests of somebody else's trainer have: nobody tells vLLM, so a
worker goes by the requests themselves.
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from mindspeed_qerl.aqn.rows import NoiseOfRows

ENGINES_APART = 1 << 32  # more draws than an engine has answers


class RequestDraws:
    """Draws of the requests that one vLLM worker serves: of each, in the order in which they come,
    which all ranks of an engine share; or of each prompt, by its tokens, since a group may be spread
    over several engines.

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
        engine = int(os.environ.get("RANK", "0")) // config.parallel_config.world_size
        self.first = 1 + ENGINES_APART * engine
        self.draws = draws
        self.numbers: dict[str, int] = {}  # draws of this step's requests

    def begin(self, rows: NoiseOfRows) -> None:
        """Makes this what says whose draw a row has, in a new step."""
        self.numbers.clear()
        rows.draw_of = self.of

    def of(self, request: Any) -> int:
        """Returns the draw of a request of vLLM's model runner."""
        if request.req_id not in self.numbers:
            self.numbers[request.req_id] = self._number(request.prompt_token_ids)
        return self.numbers[request.req_id]

    def _number(self, prompt: Sequence[int]) -> int:
        if self.draws == "answer":
            return self.first + len(self.numbers)
        digest = hashlib.sha256(repr(list(prompt)).encode()).digest()
        return 1 + int.from_bytes(digest[:6], "big")
