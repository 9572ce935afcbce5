"""Random adapters and routing replay, and what replay does to the run's log-probs.

FOLDER/full.pt as in probe.py. Written: dp{d}.pt with this data-parallel rank's answers and their
log-probs by the policy "replayed" as the run does it, "native" without, "shifted" and "swapped"
with routes that are off by a token and in other layers; experience.pt. FAULT: "uninstalled",
training passes without replay; "twice", the first answer's first token goes to one expert twice;
"lost", vLLM forgets the fourth token's routes.
"""

import driven
import probe
import torch
from driven import FAULT, FOLDER
from reference import CHANGES

from mindspeed_qerl.ascend import routing
from mindspeed_qerl.ascend.recorder import AscendRecorder


class Worker(probe.Worker):
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
        replaying = routing.RoutedPasses.around

        def around(passes, schedule):
            passes.schedule = schedule
            return schedule if FAULT == "uninstalled" else replaying(passes, schedule)

        routing.RoutedPasses.around = around

    def compute_log_prob(self):
        state, engine = self.parallel_state, self.actor_hybrid
        compute, routers = engine.compute_log_prob, engine.train_actor.routes.routers

        def computed(batch, change):
            rows = [change(routing.unpack(row, routers)) for row in batch[routing.COLUMN]]
            column = torch.nn.utils.rnn.pad_sequence(map(routing.pack, rows), batch_first=True)
            return compute({**batch, routing.COLUMN: column})[0]

        def native(batch):
            """Without what replays: the routers choose by themselves."""
            actor = engine.train_actor
            replaying, actor.forward_backward_func = (
                actor.forward_backward_func,
                actor.routes.schedule,
            )
            logprobs = compute(batch)[0]
            actor.forward_backward_func = replaying
            return logprobs

        def variants(batch):
            seen = {"input_ids": batch["input_ids"], "native": native(dict(batch))}
            for name, change in CHANGES.items():
                seen[name] = computed(batch, change)
            first = state.get_tensor_model_parallel_rank() == 0
            if first and state.is_pipeline_last_stage(ignore_virtual=True):
                torch.save(seen, FOLDER / f"dp{state.get_data_parallel_rank()}.pt")
            return compute(batch)

        engine.compute_log_prob = variants
        super().compute_log_prob()
        engine.compute_log_prob = compute


class Trainer(driven.Trainer):
    def fit(self, data_iters):
        self.on_ranks("load")
        super().fit(data_iters)
