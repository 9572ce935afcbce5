"""What a rank really allocates where the planner has a formula (`terms`): KV cache,
what is offloaded and what stays, merged weights, the weight sync, int8 copies. On emulated NPUs, whose memory is
the host's: only tensors count.

    python measure.py CONFIG.yaml FOLDER

runs a config and writes FOLDER/memory.json: for each rank its pipeline stage, and the most bytes of
each term.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_qerl.ascend.merging import adapted_layers
from mindspeed_qerl.layout import parts
from mindspeed_qerl.layout.memory import Memory


class LiveBytes(TorchDispatchMode):
    """Inside, the bytes of storages that were made inside: `now`, and `peak` after any operator."""

    def __init__(self):
        super().__init__()
        self.peak, self._made, self._before = 0, {}, set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._before |= {storage._cdata for storage in storages((args, kwargs))} - self._made.keys()
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in self._before:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def terms(memory: Memory) -> dict[str, int]:
    """Bytes of what a rehearsal measures as well here."""
    update = {part.name: part.bytes for part in memory.moments["update"]}
    sizes = {"KV cache of a token": memory.kv_token}
    sizes |= {name: update[name] for name in ("adapters", "gradients", "AdamW", "merged weights")}
    sizes |= {"frozen base": 0, "vLLM's weights": 0}
    for part in memory.moments["weight sync"]:
        name = part.name.partition(",")[0]  # of the dense part, and of the experts
        if name in ("frozen base", "vLLM's weights"):
            sizes[name] += part.bytes
    sizes["sync buffers"] = parts.size_of(parts.sync(memory.plan, memory.stage))
    for part in memory.moments["rollout"]:
        if part.name == "int8 copies":
            sizes[part.name] = part.bytes
    return sizes


def storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Of the tensors in a tree of values, each time one is met."""
    return (
        value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)
    )


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages(list(tensors))}.values())


class Meter:
    """Watches one worker's offloader, sharding manager and vLLM; `found` has the most bytes of each
    term.
    """

    def __init__(self, offloader: Any, manager: Any, rollout: Any):
        # whose import needs Megatron
        from mindspeed_qerl.ascend import loss

        self.found: dict[str, int] = {}
        self.offloader, self.rollout = offloader, rollout
        for term, tensors in {"adapters": self._parameters, "gradients": self._gradients}.items():
            part = {"adapters": "param", "gradients": "grad"}[term]
            for way, name in ((f"offload_{part}", term), (f"onload_{part}", f"{term}, back")):
                self._watch(offloader, way, functools.partial(self._moved, name, tensors))
        self._watch(offloader, "offload_optimizer", self._of_optimizer)
        self._watch(loss, "forget_merged", self._forgotten)
        self._watch(manager, "onload_infer_params", self._onloaded)
        self._watch(manager.vllm_weight_container, "get_infer_params", self._synced)
        self._watch(rollout, "init_cache_engine", functools.partial(self._cached, rollout))
        if rollout.quantized is not None:
            self._watch(
                rollout.quantized, "quantize", functools.partial(self._quantized, rollout.quantized)
            )

    @staticmethod
    def _watch(owner: Any, method: str, around: Callable) -> None:
        """`owner.method` through `around`, which is handed it as it was."""
        setattr(owner, method, functools.partial(around, getattr(owner, method)))

    def _keep(self, term: str, size: int) -> None:
        self.found[term] = max(self.found.get(term, 0), size)

    def _buffers(self) -> Iterator[Any]:
        """Megatron's, of what has a gradient."""
        for chunk in self.offloader.model:
            yield from chain(chunk.buffers, chunk.expert_parallel_buffers)

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (buffer.grad_data for buffer in self._buffers())

    def _moved(self, term: str, tensors: Callable, move: Callable) -> None:
        before = held(tensors())
        move()
        self._keep(term, abs(before - held(tensors())))
        if term == "gradients, back":  # an update begins; vLLM's parameters are the host's, asleep
            host = self.rollout.cpu_model
            awake = [
                p
                for name, p in self.rollout.model.named_parameters()
                if p.data_ptr() != host[name].data_ptr()
            ]
            self._keep("kept", held(awake) + held(chain(*self.rollout.runner.kv_caches)))
        if term == "adapters":
            self._keep(
                "frozen base",
                held(chain.from_iterable(chunk.parameters() for chunk in self.offloader.model)),
            )

    def _forgotten(self, forget: Callable, chunks: list[torch.nn.Module]) -> None:
        merged = []
        for *_, layer in adapted_layers(chunks):
            if hasattr(layer, "merged_weights"):
                merged += layer.merged_weights.values()
            else:
                merged.append(layer.merged_weight)
        self._keep("merged weights", held(merged))
        forget(chunks)

    def _of_optimizer(self, move: Callable) -> None:
        """All that upstream moves; on a CPU it finds it there and moves nothing
        (megatron_off_loader.py:165).
        """
        move()
        moved = []
        for part in self.offloader.optimizer:
            for group in part.optimizer.param_groups:
                moved += [parameter.data for parameter in group["params"]]
            for state in part.optimizer.state.values():
                moved += filter(torch.is_tensor, state.values())
        self._keep("AdamW", held(moved))

    def _onloaded(self, onload: Callable) -> None:
        with LiveBytes() as live:
            onload()
        self._keep("vLLM's weights", live.now)

    def _synced(self, sync: Callable) -> Any:
        with LiveBytes() as live:
            params = sync()
        self._keep("sync buffers", live.peak)
        return params

    def _quantized(self, quantized: Any, quantize: Callable) -> None:
        quantize()
        copies = [layer.quant_method.copy.weight for layer in quantized.methods]
        self._keep("int8 copies", held(copies))

    def _cached(self, rollout: Any, allocate: Callable) -> None:
        allocate()
        core = rollout.llm.llm_engine.engine_core.engine_core
        runner = rollout.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        tokens = (
            core.kv_cache_configs[0].num_blocks * rollout.llm.llm_engine.cache_config.block_size
        )
        size = held(chain.from_iterable(runner.kv_caches))
        self._keep("KV cache", size)
        self._keep("KV cache of a token", size // tokens)


def measuring_classes() -> tuple[type, type]:
    import ray

    # the module's, not __main__'s: workers import it
    from measure import Meter
    from probe import FOLDER

    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class MeasuringWorker(QeRLWorker.__ray_actor_class__):
        def _build_sharding_manager(self):
            manager = super()._build_sharding_manager()
            self.meter = Meter(self.actor_offloader, manager, self.inference_model)
            return manager

        def measured(self):
            stage = self.parallel_state.get_pipeline_model_parallel_rank()
            return {"stage": stage, **self.meter.found}

    class MeasuringTrainer(QeRLTrainer):
        def log_metrics(self, metrics, iteration):
            super().log_metrics(metrics, iteration)
            measured = self.actor_worker.execute_sync_command("measured")
            (FOLDER / "memory.json").write_text(json.dumps(measured))

    return MeasuringWorker, MeasuringTrainer


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from probe import main

    sys.exit(main(measuring_classes))
