"""What a rank really allocates where the planner has a formula (rehearsal.terms): KV cache, what is
offloaded and what stays, merged weights, the weight sync, int8 copies. On emulated NPUs, whose
memory is the host's: only tensors count. Of each rank its pipeline stage is found, and the most
bytes of each term.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import driven
import torch
from driven import Trainer  # noqa: F401
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_qerl.ascend import loss
from mindspeed_qerl.ascend.merging import adapted_layers


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


class Worker(driven.Worker):
    def _build_sharding_manager(self):
        from measure import Meter  # the module's own, not a copy that was sent

        manager = super()._build_sharding_manager()
        self.meter = Meter(self.actor_offloader, manager, self.inference_model)
        return manager

    def found(self):
        stage = self.parallel_state.get_pipeline_model_parallel_rank()
        return {"stage": stage, **self.meter.found}
