"""Routes: which experts each token of a sequence went to, in every layer that has some."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Routers:
    """The routers of a model: the layers that have one, counted from 0 over the whole model, the
    experts of each, and how many of them a token goes to.
    """

    layers: tuple[int, ...]
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest that holds an expert's id.

        >>> Routers((0, 1), experts=128, top_k=8).dtype, Routers((0, 1), experts=512, top_k=8).dtype
        (dtype('uint8'), dtype('uint16'))
        """
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)


def routes_fault(routes: np.ndarray | None, tokens: int, routers: Routers) -> str | None:
    """Checks whether `routes` can be those of a sequence of which `tokens` tokens went through the
    model.

    Args:
        routes: integers [tokens, layers, top_k]: ids of experts, in any order; None if nobody
            recorded any.

    >>> routers = Routers(layers=(0, 2), experts=4, top_k=2)
    >>> routes_fault(np.array([[[0, 1], [3, 2]]]), 1, routers)
    >>> routes_fault(np.array([[[0, 1], [3, 3]]]), 1, routers)
    'layer 2 sends token 0 to the same expert twice: [3, 3]'
    """
    if routes is None:
        return "it has no routes"
    wanted = (tokens, len(routers.layers), routers.top_k)
    if routes.shape != wanted:
        return (
            f"its routes have the shape {list(routes.shape)}, and {tokens} tokens in {wanted[1]} "
            f"layers with {wanted[2]} experts a token give {list(wanted)}: they are of another "
            "sequence or another model"
        )
    ordered = np.sort(routes, axis=-1)
    outside = (routes < 0) | (routes >= routers.experts)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for wrong, what in (
        (outside.any(-1), f"an expert that is none of its {routers.experts}"),
        (twice, "the same expert twice"),
    ):
        if wrong.any():
            token, layer = np.argwhere(wrong)[0]
            experts = routes[token, layer].tolist()
            return f"layer {routers.layers[layer]} sends token {token} to {what}: {experts}"
    return None


def answer_of(request_id: str) -> tuple[str, int]:
    """(id that vLLM's caller sees, number of the answer) of the id that its scheduler has for one
    of n answers (vllm/v1/engine: parallel_sampling.py `get_child_info`, input_processor.py
    `assign_request_id`).

    >>> answer_of("3_17-0a1b2c3d"), answer_of("17-0a1b2c3d"), answer_of("3_17"), answer_of("17")
    (('17', 3), ('17', 0), ('17', 3), ('17', 0))
    """
    number, _, request = request_id.rpartition("_")
    return request.partition("-")[0], int(number or 0)
