"""The lines that one vLLM worker leaves in the report's folder (report.py)."""

import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from mindspeed_qerl.common.files import read_jsonl

from .settings import Settings

logger = logging.getLogger(__name__)


class Lines:
    """
    Attributes:
        cannot_write: whether the folder refused a line, which was told once.
    """

    cannot_write = False

    def __init__(self, worker: Any, settings: Settings):
        self.worker = worker
        self.replicas = settings.replicas
        self.folder = Path(settings.report)

    def write(self, event: str, sync: int, **values: Any) -> None:
        parallel = self.worker.vllm_config.parallel_config
        line = {
            "event": event,
            "sync": sync,
            "rank": self.worker.rank,
            "world": parallel.world_size,
            "replicas": self.replicas or getattr(parallel, "data_parallel_size", 1),
            **values,
        }
        path = self.folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            if not self.cannot_write:
                logger.error(f"AQN's report cannot be written, the run goes on without: {error}")
            self.cannot_write = True

    def measured_before(self, step: int) -> dict[int, dict[str, float]]:
        """Returns what this rank was told before, from the lines of a run that is resumed."""
        files = sorted(self.folder.glob("*.jsonl"), key=os.path.getmtime)
        found = {}
        for file in files:
            for row in read_jsonl(file):
                is_own = row["event"] == "measured" and row["rank"] == self.worker.rank
                if is_own and row["step"] < step:
                    found[row["step"]] = row
        return found
