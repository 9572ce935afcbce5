"""A run of the real engine that decodes with graphs, each of its samples once more without, or with
a planted fault.

    python graphs_run.py CONFIG.yaml FOLDER [FAULT]

FOLDER/rank{r}.jsonl has a line for each time that this rank asked vLLM: what for, at which step, by
which noise, how many steps were replayed, the largest distance of a token's log-prob from that of
the same rollout without graphs, and whether all tokens are the same. FAULT is a function below, or
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


def repointed_weight(rollout, worker):
    """The sync brings a weight in memory of its own."""
    weight = rollout.model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.clone()


def stale_gate(rollout, worker):
    """The router is another parameter than the one that was captured."""
    import torch

    gate = rollout.model.model.layers[0].mlp.gate
    gate.weight = torch.nn.Parameter(gate.weight.data.clone(), requires_grad=False)


def freed_cache(rollout, worker):
    """As upstream frees it between rollouts."""
    type(rollout).__mro__[1].free_cache_engine(rollout)


def rebuilt_buffers(rollout, worker):
    """As upstream destroys and rebuilds them; the sync comes again."""
    for buffer in worker.sharding_manager.vllm_weight_container.weight_buffers:
        buffer.destroy()
    worker.sharding_manager.enter_infer_mode()


def noise_in_the_old_buffer(rollout, worker):
    """Noise is put on a copy that the model no longer has."""
    target = rollout.injector.targets[0].module
    target.weight.data = target.weight.data.clone()


def stale_graph(rollout, worker):
    """One captured operator computes with a copy of its weight, at the address it was told."""
    import torch

    weight = rollout.model.model.norm.weight
    entries = rollout.runner.model.concrete_aclgraph_entries.values()
    stale = torch.ones_like(weight)
    for entry in entries:
        for step in entry.aclgraph.steps:
            arguments = getattr(step, "arguments", None)
            if arguments and step.name == "npu_add_rms_norm":
                last = step
        last.arguments = ((*last.arguments[0][:2], stale, *last.arguments[0][3:]), {})


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

            def twice(prompts, **options):
                if FAULT not in ("", UPSTREAM) and len(asked) == 2:
                    globals()[FAULT](rollout, self)
                asked.append(prompts)
                replayed.clear()
                captured = sample(prompts, **options)
                steps = len(replayed)
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
                distances = [
                    abs(x - y) for (_, a), (_, b) in pairs for x, y in zip(a, b)
                ]
                purpose, step = rollout.seed_of
                report = rollout.noise_report
                line = {
                    "purpose": purpose, "step": step, "sigma": report.sigma if report else None,
                    "replayed": steps, "distance": max(distances, default=0.0),
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
