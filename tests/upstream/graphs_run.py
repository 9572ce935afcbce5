"""A run of the real engine that decodes with graphs, each of its samples once more without, or with
a planted fault.

    python graphs_run.py CONFIG.yaml FOLDER [FAULT]

FOLDER/rank{r}.jsonl has a line for each time that this rank asked vLLM: what for, at which step, by
which noise, how many steps were replayed, the largest distance of a token's log-prob from that of
the same rollout without graphs, and whether all tokens are the same. FAULT is one of FAULTS, or
UPSTREAM: graphs as upstream would capture and keep them, in memory that nobody takes.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from probe import FOLDER, main

UPSTREAM = "upstream"
FAULT = sys.argv[3] if len(sys.argv) > 3 else ""


def leave_it_to_upstream():
    """Of ours, only the compilation config."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    from mindspeed_qerl.ascend import graphs
    from mindspeed_qerl.emulation import graphs as emulated

    emulated.KEEPS_FREED = True
    install, capture_model = graphs.install, NPUModelRunner.capture_model

    def installed(max_num_seqs):
        install(max_num_seqs)
        NPUModelRunner.capture_model = capture_model

    graphs.install = installed


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


def graph_classes():
    import ray
    from reference import drawn
    from vllm.config import CUDAGraphMode

    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class GraphWorker(QeRLWorker.__ray_actor_class__):
        def _build_rollout(self):
            if FAULT == UPSTREAM:
                leave_it_to_upstream()
            rollout = super()._build_rollout()
            if FAULT == UPSTREAM:
                rollout.graphs = None
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
                if FAULT not in ("", UPSTREAM) and len(asked) == 2:
                    FAULTS[FAULT](rollout)
                asked.append(prompts)
                replayed.clear()
                resets.clear()
                captured = sample(prompts, **options)
                steps, emptied = len(replayed), len(resets)
                graphs = rollout.graphs
                with patch.object(graphs, "ready", lambda: None) if graphs else nullcontext():
                    rollout.init_cache_engine()
                with patch.object(rollout, "init_cache_engine", lambda: None):
                    is_eager[0] = True
                    eager = sample(prompts, **options)
                    is_eager[0] = False
                answers = [answer for group in captured for answer in group]
                others = [answer for group in eager for answer in group]
                pairs = [(drawn(a), drawn(b)) for a, b in zip(answers, others, strict=True)]
                distances = [abs(x - y) for (_, a), (_, b) in pairs for x, y in zip(a, b)]
                state, report = rollout.state, rollout.noise_report
                line = {
                    "purpose": state.purpose, "step": state.step, "sigma": report.sigma if report else None,
                    "replayed": steps, "resets": emptied, "distance": max(distances, default=0.0),
                    "same": all(a == b for (a, _), (b, _) in pairs),
                    "routes": [
                        bool((a.routes == b.routes).all()) for a, b in zip(answers, others)
                        if getattr(a, "routes", None) is not None
                    ],
                    "difference": graphs.difference if graphs else None,
                    "first": drawn(answers[0]),
                }  # fmt: skip
                with open(Path(FOLDER) / f"rank{self._rank}.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
                return captured

            rollout.sample = twice
            return rollout

    return GraphWorker, QeRLTrainer


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(graph_classes))
