"""What a run of drive.py and the modules of its worker have in common; it can be imported once
upstream can.
"""

import json
import os
from pathlib import Path

import ray
import torch

from mindspeed_qerl.ascend.trainer import QeRLTrainer
from mindspeed_qerl.ascend.worker import QeRLWorker

FOLDER = Path(os.environ["DRIVEN_FOLDER"])
FAULT = os.environ["DRIVEN_FAULT"]  # "" or the one that is planted


class Worker(QeRLWorker.__ray_actor_class__):
    """Ours, for modules to extend."""

    def found(self):
        """What was seen in this rank since the last step; a module has more to say."""
        return []

    def write(self, line: dict) -> None:
        """A line more in FOLDER/rank{r}.jsonl."""
        with open(FOLDER / f"rank{self._rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


class Trainer(QeRLTrainer):
    """Ours; what the ranks found in the last step is in FOLDER/found.json, the dock's content at
    the end of the last iteration, which upstream throws away, in FOLDER/experience.pt.
    """

    def fit(self, data_iters):
        strategy, clear = self.data_strategy, self.data_strategy.clear_main

        def keep_and_clear(*arguments):
            experience = ray.get(strategy.td.get_experience_data.remote())
            torch.save({"experience": experience}, FOLDER / "experience.pt")
            clear(*arguments)

        strategy.clear_main = keep_and_clear
        super().fit(data_iters)

    def log_metrics(self, metrics, iteration):
        super().log_metrics(metrics, iteration)
        (FOLDER / "found.json").write_text(json.dumps(self.on_ranks("found")))
