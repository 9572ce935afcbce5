"""Decoding with graphs, each sample of a run once more without, or with a planted fault.

FOLDER/rank{r}.jsonl has a line for each time that this rank asked vLLM: what for, at which step, by
which noise and draws, how many steps were replayed, and whether tokens, log-probs and routes are
those of the same rollout without graphs. FAULT is one of FAULTS.
"""

from itertools import chain
from unittest.mock import patch

import driven
from driven import FAULT, Trainer  # noqa: F401
from reference import drawn
from vllm.config import CUDAGraphMode


def repointed_weight(rollout):
    """As upstream's own sync leaves them all."""
    weight = rollout.model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.clone()


def stale_graph(rollout):
    """The last norm's weight is a copy in the graphs, whose address was kept."""
    for entry in rollout.runner.model.concrete_aclgraph_entries.values():
        last = [
            step for step in entry.aclgraph.steps if "add_rms_norm" in getattr(step, "name", "")
        ]
        (x, residual, weight, *rest), more = last[-1].arguments
        last[-1].arguments = (x, residual, weight.tensor() / 2, *rest), more
    rollout.graphs._asked = 0  # the next rollout is compared


FAULTS = {"repointed_weight": repointed_weight, "stale_graph": stale_graph}


class Worker(driven.Worker):
    def _build_rollout(self):
        rollout = super()._build_rollout()
        sample, asked = rollout.sample, []
        dispatcher = rollout.runner.aclgraph_dispatcher
        dispatch, replayed, is_eager = dispatcher.dispatch, [], [False]

        def dispatched(descriptor):
            mode, found = dispatch(descriptor)
            if is_eager[0]:
                return CUDAGraphMode.NONE, None
            if mode is CUDAGraphMode.FULL:
                replayed.append(found.num_tokens)
            return mode, found

        dispatcher.dispatch = dispatched
        engine, resets = rollout.llm.llm_engine, []
        reset = engine.reset_prefix_cache
        engine.reset_prefix_cache = lambda: resets.append(1) or reset()

        def twice(prompts, **options):
            if FAULT and len(asked) == 2:
                FAULTS[FAULT](rollout)
            asked.append(prompts)
            replayed.clear()
            resets.clear()
            groups = sample(prompts, **options)
            captured = list(chain(*groups))
            steps, emptied = len(replayed), len(resets)
            with patch.object(rollout.graphs, "ready", lambda: None):
                rollout.init_cache_engine()
            with patch.object(rollout, "init_cache_engine", lambda: None):
                is_eager[0] = True
                eager = list(chain(*sample(prompts, **options)))
                is_eager[0] = False
            pairs = [(drawn(a), drawn(b)) for a, b in zip(captured, eager, strict=True)]
            report = rollout.noise_report
            self.write(
                {
                    "purpose": rollout.state.purpose,
                    "step": rollout.state.step,
                    "sigma": report.sigma if report else None,
                    "replayed": steps,
                    "resets": emptied,
                    "draws": list(options.get("draws", ())),
                    "same": all(a == b for a, b in pairs),
                    "routes": [
                        bool((a.routes == b.routes).all())
                        for a, b in zip(captured, eager)
                        if getattr(a, "routes", None) is not None
                    ],
                }
            )
            return groups

        rollout.sample = twice
        return rollout
