"""A weight of its own for each row of vLLM's batch: y = (x / rms(x)) * (w + sigma z[draw of the row]).

A norm's weight is a vector, so answers of one batch can each have their own: the kernel gets a
weight of 1, and what it returns is multiplied by the row of a table. Which draw a row has is known
of its request (`TAG`), through batching, preemption, prefix hits and prompts in chunks. vLLM is not
imported: its model runner is given (v1: vllm/v1/worker/gpu_model_runner.py;
vllm_ascend/worker/model_runner_v1.py).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

TAG = "aqn_draw"  # of SamplingParams.extra_args: the draw of a request, counted from 1
Noisy = Callable[[int], Tensor]  # a draw's noisy weight [hidden], on the CPU


def salt_of(draw: int) -> str:
    """Returns the `cache_salt` of a prompt whose keys and values are of this draw alone."""
    return f"{TAG} {draw}"


def requests_of_answers(
    prompts: Sequence[Any], params: Sequence[Any], draws: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Returns a request for each answer, with its draw of the noise and the seed that vLLM would
    give it.

    Args:
        prompts, params: of requests for n answers each, TokensPrompt and SamplingParams. draws: of
            each answer.
    """
    asked: list[Any] = []
    of_answers = []
    for prompt, of_prompt in zip(prompts, params):
        for number in range(of_prompt.n):
            draw = draws[len(asked)]
            own = of_prompt.clone()
            own.n = 1
            if own.seed is not None:
                own.seed += number
            own.extra_args = {TAG: draw}
            asked.append(prompt | {"cache_salt": salt_of(draw)})
            of_answers.append(own)
    return asked, of_answers


def tagged_draw(request: Any) -> int:
    """Returns the draw of a request of the runner; 0: it has none."""
    return (request.sampling_params.extra_args or {}).get(TAG, 0)


class NoiseOfRows:
    """Norms whose weight is another for each row, while `begin` ... `end`.

    Args:
        runner: vLLM's model runner.
        norms: those that get noise, on one device.
        stays: whether the products are there without noise, too, by 1, as a graph needs that was
            captured with them.

    Attributes:
        index: int64 [most tokens of a pass], each row's place in the tables; 0, which has a weight
            of 1, of padding, of passes that nobody asked for, and without noise.
        tables: of each norm [1 + most requests of a batch, hidden]. Like `index` they keep their
            addresses.
        draw_of: says which draw a request of the runner has.
    """

    def __init__(self, runner: Any, norms: Sequence[torch.nn.Module], stays: bool = False):
        self.runner = runner
        self.norms = norms
        self.stays = stays
        places = 1 + runner.max_num_reqs
        device = norms[0].weight.device
        self.index = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=device)
        self.tables = [norm.weight.new_ones(places, len(norm.weight)) for norm in norms]
        self.draw_of: Callable[[Any], int] = tagged_draw
        self.noisy: list[Noisy] = []  # of each norm; none: no noise is on
        self.place_of: dict[int, int] = {}  # by draw
        # rows of the pass whose draws are known; None: of none
        self.known: int | None = None
        self.multiplied: dict[torch.nn.Module, int] = {}  # rows, of each norm in that pass
        self.attached = ExitStack()
        if stays:
            self._attach()

    def begin(self, noisy: Sequence[Noisy]) -> None:
        """From now on rows have the noisy weights of their draws."""
        self.noisy = list(noisy)
        self.place_of = {}
        self.known = None
        if not self.stays:
            self._attach()

    def end(self) -> None:
        """From now on norms have their own weight alone."""
        self.noisy = []
        self.index.zero_()
        if not self.stays:
            self.attached.close()
        self._check_multiplied()

    def _attach(self) -> None:
        for norm, table in zip(self.norms, self.tables):
            hook = norm.register_forward_hook(partial(self._product, table))
            self.attached.callback(hook.remove)
        for name, wrapper in (("_prepare_inputs", self._prepare), ("_dummy_run", self._dummy)):
            setattr(self.runner, name, partial(wrapper, getattr(self.runner, name)))
            # the class's own is there again
            self.attached.callback(delattr, self.runner, name)

    def _product(self, table: Tensor, norm: torch.nn.Module, inputs: Any, output: Any) -> Any:
        """The hook of a norm; beside a residual its kernel returns two tensors."""
        normed, *rest = output if isinstance(output, tuple) else (output,)
        if self.noisy:
            if self.known is None or not self.known <= len(normed) <= len(self.index):
                raise RuntimeError(
                    "AQN has a draw for each answer or group on, and vLLM's model runner began a "
                    f"pass of {len(normed)} rows, having said whose draw {self.known or 'none'} "
                    "have: it splits its batches, or prepares them otherwise, or the norm's rows "
                    "are no tokens. Take draws = 'step'"
                )
            self.multiplied[norm] = len(normed)
        weights = table.index_select(0, self.index[: len(normed)])
        if normed.dim() == 3:  # [tokens, heads, width]: norms of q and k
            weights = weights.unsqueeze(1)
        product = normed * weights
        return (product, *rest) if rest else product

    def _prepare(self, prepare: Callable, scheduled: Any, *arguments: Any, **more: Any) -> Any:
        """The runner's `_prepare_inputs`, after which the order of its batch stands."""
        result = prepare(scheduled, *arguments, **more)
        if self.noisy:
            self._fill(scheduled.num_scheduled_tokens)
        return result

    def _dummy(self, run: Callable, *arguments: Any, **more: Any) -> Any:
        """The runner's `_dummy_run`, a pass without requests."""
        self._check_multiplied()
        self.index.zero_()
        self.known = 0
        result = run(*arguments, **more)
        self.known = None
        self.multiplied = {}
        return result

    def _check_multiplied(self) -> None:
        """RuntimeError if in the last pass not all norms came by, or with other rows; a graph that
        is replayed calls none.
        """
        rows, known = self.multiplied, self.known
        self.multiplied, self.known = {}, None
        if not known or (self.stays and not rows):
            return
        if len(rows) < len(self.norms) or len(set(rows.values())) > 1:
            raise RuntimeError(
                "AQN has a draw for each answer or group on, and in a pass of "
                f"{known} tokens {len(rows)} of {len(self.norms)} norms had rows of their "
                f"own, as many as {sorted(set(rows.values()))}: another kernel reads the weights "
                "of the rest, or the rows are no tokens (heads, an image's patches). Exclude such "
                "norms, or take draws = 'step'"
            )

    def _fill(self, scheduled: dict[str, int]) -> None:
        """Says of each row of the next pass which weights it has. scheduled: tokens by request."""
        self._check_multiplied()
        requests = self.runner.input_batch.req_ids
        draws = [self.draw_of(self.runner.requests[request]) for request in requests]
        if not all(draws):
            raise RuntimeError(
                "AQN has a draw for each answer or group on, and request "
                f"{requests[draws.index(0)]} names none ({TAG} in extra_args of its sampling "
                "parameters)"
            )
        self._write(draws)
        places = [self.place_of[draw] for draw in draws]
        of_rows = np.repeat(places, [scheduled[request] for request in requests])
        self.known = len(of_rows)
        whole = np.zeros(len(self.index), dtype=np.int64)
        whole[: self.known] = of_rows
        self.index.copy_(torch.from_numpy(whole))

    def _write(self, draws: Sequence[int]) -> None:
        """Puts those of `draws` into the tables that are not there; where a table would overflow,
        in the places of draws that this batch does not have. One that comes again is drawn again,
        with the same bits.
        """
        missing = sorted(set(draws) - self.place_of.keys())
        if not missing:
            return
        if len(self.place_of) + len(missing) >= len(self.tables[0]):
            self.place_of = {draw: self.place_of[draw] for draw in self.place_of.keys() & draws}
        free = set(range(1, len(self.tables[0]))) - set(self.place_of.values())
        places = sorted(free)[: len(missing)]
        self.place_of |= zip(missing, places)
        for noisy, table in zip(self.noisy, self.tables):
            table[places] = torch.stack([noisy(draw) for draw in missing]).to(table.device)
