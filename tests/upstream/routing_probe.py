"""A run of the real engine with random adapters and routing replay, and what replay does to its
log-probs.

    python routing_probe.py CONFIG.yaml FOLDER [FAULT]

FOLDER/full.pt as in probe.py. Written: dp{d}.pt with this data-parallel rank's answers and their
log-probs by the policy "replayed" as the run does it, "native" without, "shifted" and "swapped"
with routes that are off by a token and in other layers; experience.pt. FAULT: "uninstalled",
training passes without replay; "twice", the first answer's first token goes to one expert twice;
"lost", vLLM forgets the fourth token's routes.
"""

import sys
from pathlib import Path

import torch
from probe import FOLDER, dock_trainer, main, probe_classes

FAULT = sys.argv[3] if len(sys.argv) > 3 else ""


def routing_classes():
    import ray

    from mindspeed_qerl.ascend import routing
    from mindspeed_qerl.ascend.recorder import AscendRecorder

    worker = probe_classes()[0].__ray_actor_class__

    @ray.remote(resources={"NPU": 0.7})
    class RoutingWorker(worker):
        def setup_distributed_rank(self):
            super().setup_distributed_rank()
            take = AscendRecorder.take

            def taken(recorder, outputs):
                if FAULT == "lost":
                    for known in recorder.known.values():
                        known[3] = False
                found = take(recorder, outputs)
                if FAULT == "twice":
                    found[0][0][0, 1] = 5
                return found

            AscendRecorder.take = taken
            if FAULT == "uninstalled":
                routing.RoutedPasses.around = lambda passes, forward_backward: forward_backward

        def compute_log_prob(self):
            state, engine = self.parallel_state, self.actor_hybrid
            compute, routers = engine.compute_log_prob, engine.train_actor.routes.routers

            def changed(batch, change):
                rows = [
                    routing.pack(change(routing.unpack(row, routers)))
                    for row in batch[routing.COLUMN]
                ]
                return {
                    **batch,
                    routing.COLUMN: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
                }

            def variants(batch):
                seen = {
                    name: batch[name] for name in ("input_ids", "prompt_length", "response_length")
                }
                if routing.COLUMN in batch:
                    seen["native"] = {
                        name: column for name, column in batch.items() if name != routing.COLUMN
                    }
                    seen["shifted"] = changed(
                        batch, lambda routes: routes[[-1, *range(len(routes) - 1)]]
                    )
                    seen["swapped"] = changed(batch, lambda routes: routes[:, ::-1])
                    seen["replayed"] = dict(batch)
                    for name in ("native", "shifted", "swapped", "replayed"):
                        seen[name] = compute(seen[name])[0]
                first = state.get_tensor_model_parallel_rank() == 0
                if first and state.is_pipeline_last_stage(ignore_virtual=True):
                    torch.save(seen, FOLDER / f"dp{state.get_data_parallel_rank()}.pt")
                return compute(batch)

            engine.compute_log_prob = variants
            super().compute_log_prob()
            engine.compute_log_prob = compute

    class RoutingTrainer(dock_trainer()):
        def fit(self, data_iters):
            self.on_ranks("load", FOLDER, False)
            super().fit(data_iters)

    return RoutingWorker, RoutingTrainer


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(routing_classes))
