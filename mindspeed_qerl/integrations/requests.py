"""Do sampled requests have the weights and the adapters of this sync? Of one vLLM worker."""

import json
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from mindspeed_qerl.lora.arrival import Arrival, scaled_adapters
from mindspeed_qerl.lora.held import Held, held_adapters

# adapters that vLLM keeps in forms of their own
NOT_COMPARED = r"\.experts\.|embed_tokens|lm_head"
OWN_FORM = "an adapter of experts or of the vocabulary"
FILE = "adapter_model.safetensors"
BYPASSED = "vLLM put them in place without load_weights, so that what was sent is not known"
BYPASSING = ("M2N", "ShardedRDT")  # vLLM's engines that put some there, and load others


class Weights(Enum):
    """Says what a worker can sample from."""

    WHOLE = "whole"  # as they were synced, or loaded from disk
    ARRIVING = "arriving"  # a sync has begun, and ends with the next batch
    DISCARDED = "discarded"  # by a sleep at level 2


class Steps:
    """Which step's weights the training batches sample with."""

    has_synced = False  # since the last of these batches
    of_weights: int | None = None

    def problem(self, step: int) -> str | None:
        """Says that the trainer's step moved to `step`, and nothing was sent."""
        if self.has_synced or self.of_weights is None:
            self.of_weights = step
            self.has_synced = False
        if step <= self.of_weights:
            return None
        return f"step {step} sampled with the weights of step {self.of_weights}: no sync came"


class LoadedAdapters:
    """The adapters that were loaded into a worker.

    Attributes:
        waiting: id of one that was noted in `arrival`, and is not yet compared.
        not_compared: by reason, how many tensors of NOT_COMPARED came with it.
        required: ids of those of the last sync of adapters, of which each request uses one.
        earlier: those of the sync before, which requests that waited since then use.
        tolerated: those that requests since the last sync used without a fault, which is one if by
            the next sync none has used a required one.
        removed_by: the sync of weights that removed them; 0: none did.
    """

    waiting: int | None = None
    sync = 0  # of `required`
    removed_by = 0

    def __init__(self, elements: int):
        # scaled here and there, which may round in another order
        self.arrival = Arrival(elements, tolerance=2)
        self.not_compared = {OWN_FORM: 0}
        self.required: set[int] = set()
        self.earlier: set[int] = set()
        self.tolerated: set[int] = set()
        self.unused: str | None = None  # a problem that was seen when it was too late
        self.files: dict[int, Any] = {}  # by id, as `file_of` tells them

    def load(self, request: Any, sync: int) -> None:
        """A sync loads the adapter of `request`, as requests have to use it."""
        if self.sync != sync:
            if self.tolerated and not self.tolerated & self.required:
                used = sorted(map(str, self.tolerated))
                self.unused = (
                    f"no request used {sorted(self.required)}, loaded in sync {self.sync}; "
                    f"adapters of requests until sync {sync}: {', '.join(used)}"
                )
            self.earlier = self.required
            self.required = set()
            self.tolerated = set()
        self.sync = sync
        self.removed_by = 0
        self.required.add(request.lora_int_id)

    def remove(self, sync: int) -> None:
        self.files.clear()
        self.removed_by = sync

    def is_new(self, request: Any) -> bool:
        """Returns True, once, if `request` names an adapter, or a file of it, that was not seen."""
        adapter = request.lora_int_id
        file = file_of(request)
        is_new = adapter not in self.files or file not in (None, self.files[adapter])
        if is_new:
            self.files[adapter] = file
        return is_new

    def expect(self, request: Any) -> str | None:
        """Notes the adapter of `request`; returns why it cannot be compared, None if it can."""
        if self.waiting is not None:
            return f"adapter {request.lora_int_id} came with another one, {self.waiting}"
        tensors = getattr(request, "lora_tensors", None)  # verl's and ms-swift's requests
        if tensors:
            config = request.peft_config
        elif file := file_of(request):
            from safetensors.torch import load_file

            tensors = load_file(file[0])
            config = json.loads(Path(file[0]).with_name("adapter_config.json").read_text())
        else:
            return f"the adapter has no tensors, and its path no {FILE}"
        self.waiting = request.lora_int_id
        self.arrival.begin()
        self.not_compared[OWN_FORM] = 0
        for name, tensor in scaled_adapters(tensors, config):
            if re.search(NOT_COMPARED, name):
                self.not_compared[OWN_FORM] += 1
            else:  # before vLLM scales B in place
                self.arrival.expect(name, tensor)
        return None

    def held(self, worker: Any) -> Iterable[Held]:
        """Returns what vLLM's worker has of the waiting adapter, which waits no more."""
        slots = worker.model_runner.lora_manager._adapter_manager.lora_index_to_id
        adapter = self.waiting
        self.waiting = None
        return held_adapters(worker.get_model(), slots.index(adapter)) if adapter in slots else ()

    def problems(self, requests: Iterable[Any]) -> Iterator[str]:
        """Says which requests of vLLM's scheduler do not use an adapter of the last sync."""
        if self.unused:
            yield self.unused
            self.unused = None
        for request in requests:
            used = getattr(request.lora_request, "lora_int_id", None)
            if used in self.required or used in self.earlier:
                self.tolerated.add(used)
                continue
            if not self.required:
                continue
            which = "no adapter" if used is None else f"adapter {used}"
            problem = (
                f"requests sample with {which} instead of {sorted(self.required)}, loaded in sync "
                f"{self.sync}"
            )
            if self.removed_by:
                problem += f"; sync {self.removed_by}, of weights, has removed it from vLLM"
            yield problem


def file_of(request: Any) -> tuple[str, int] | None:
    """Returns the file of an adapter that is given by its path, and when it was written."""
    path = getattr(request, "lora_path", None)
    file = Path(path or "") / FILE
    if not path or not file.is_file():
        return None
    return str(file), file.stat().st_mtime_ns


def bypasses(worker: Any) -> bool:
    """Returns True if vLLM's worker is synced by an engine that puts weights in place itself."""
    engine = getattr(worker, "weight_transfer_engine", None)
    return type(engine).__name__.startswith(BYPASSING)
