"""Random mutations of every shipped config, on each engine: nothing but a Recipe or refusals in
words.

    python tests/recipe/mutations.py 3000    # of each config and engine: a quarter of an hour
"""

import copy
import random
import sys

from mindspeed_qerl.engines import ENGINES, examine
from mindspeed_qerl.recipe.compose import CONFIGS, compose
from mindspeed_qerl.recipe.types import Recipe

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
VALUES = (
    *(None, True, False, 0, -1, 1, 3, 10**12, 1.5, -0.5, float("nan"), float("inf")),
    *("", "x", "5e-6", "local", "1,2", "../../x", "${x}", b"b"),
    *([], [1], ["x"], [None], [[1]], {}, {"a": 1}, {"x": {"y": 1}}, (1, 2), {1: 2}, set()),
)


def paths(node, above=()):
    """The path of every key, of sections too."""
    for key, value in node.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def mutated(config, rng):
    """`config` with one to three keys missing, misspelt, of another type, extreme, or anything."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *above, key = rng.choice(list(paths(config)) or [("engine",)])
        node = config
        for step in above:
            node = node[step]
        value = node.get(key)
        kind = rng.choice(("missing", "anything", "anything", "misspelt", "text", "extreme"))
        if kind == "missing":
            node.pop(key, None)
        elif kind == "misspelt":
            node[f"{key}x"] = value
        elif kind == "text":
            node[key] = str(value)
        elif kind == "extreme":
            node[key] = value * 10**9 if isinstance(value, (int, float)) else [value]
        else:
            node[key] = copy.deepcopy(rng.choice(VALUES))
    return config


def run(name, engine, count, seed=0):
    """Examine `count` mutations of a config on an engine; returns how many were accepted.
    AssertionError or whatever `examine` raises.
    """
    config = {**compose(name), "engine": engine}
    rng, accepted = random.Random(f"{name}/{engine}/{seed}"), 0
    for _ in range(count):
        raw = mutated(config, rng)
        recipe, found = examine(raw)
        assert isinstance(recipe, Recipe), raw
        assert all(fault.rule and str(fault) for fault in found.faults), raw
        accepted += not found.faults
    return accepted


if __name__ == "__main__":
    for name in NAMES:
        for engine in ENGINES:
            accepted = run(name, engine, int(sys.argv[1]))
            print(f"{name} on {engine}: {accepted} of {sys.argv[1]} accepted", flush=True)
