"""Captured decoding in vllm-ascend (docs/ascend.md, Graphs): one launch for all layers of a step.

A graph replays on the addresses that it was captured with. Upstream moves all of them at every
sync (memory_buffer.py `destroy`, vllm_engine.py `offload_model_weights` and `free_cache_engine`),
and vllm-ascend captures a size once (compilation/acl_graph.py). So here weights and KV cache stay
where they are from the first capture on, which is of the first weights that were synced; later ones
are copied into the same memory. That they are is checked, not trusted (`DecodeGraphs.ready`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mindspeed_rl.models.rollout import vllm_engine
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm_ascend.compilation import acl_graph
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.layout.sizes import capture_sizes

EVERY = 20  # rollouts and evaluations for one step that is computed without its graph, too
TOLERANCE = 2**-6  # of a token's largest hidden state: some roundings of bfloat16
EAGER = "generate_config.enforce_eager=true goes without graphs"

_capture_model = NPUModelRunner.capture_model


def install(max_num_seqs: int) -> None:
    """Before upstream makes its engine, which passes no compilation config on
    (vllm_engine.py:222), and would capture random weights.
    """
    config = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": capture_sizes(max_num_seqs)[::-1],
    }
    vllm_engine.LLM = partial(vllm_engine.LLM, compilation_config=config)
    NPUModelRunner.capture_model = lambda runner: None


class DecodeGraphs:
    """The decode graphs of vllm-ascend's `runner`.

    Attributes:
        addresses: of what the graphs use, by name; None before they are captured.
        on_replay: told the number of rows of a step before it is replayed.
        difference: of the last step that was computed both ways, as `_compare` has it.
    """

    addresses = None
    difference = 0.0
    _asked = 0
    _compares = False
    _is_prefill_anywhere = False

    def __init__(self, runner: Any):
        self.runner = runner
        self.on_replay = lambda rows: None
        dispatcher = runner.aclgraph_dispatcher
        runner._sync_metadata_across_dp = partial(self._sync, runner._sync_metadata_across_dp)
        dispatcher.dispatch = partial(self._dispatch, dispatcher.dispatch)
        # of a rank that has sequences, and of one that only keeps others company
        for name in ("_generate_process_reqs_hidden_states", "_generate_dummy_run_hidden_states"):
            setattr(runner, name, partial(self._run, getattr(runner, name), "process" in name))

    def ready(self) -> None:
        """For a rollout or an evaluation, on all ranks: weights are synced, the cache is there.
        EngineError: a graph uses other memory than what was synced into.
        """
        if self.addresses is None:
            self._capture()
        now = addresses_of(self.runner)
        then = self.addresses
        moved = [name for name in then | now if now.get(name) != then.get(name)]
        if moved:
            raise EngineError(
                f"{len(moved)} of {len(now)} tensors that decode graphs use lie elsewhere than "
                f"when they were captured, first {moved[0]}: the graphs would answer with stale "
                f"weights. {EAGER}"
            )
        self._compares = self._asked % EVERY == 0
        self._asked += 1

    def _capture(self) -> None:
        """Captures the graphs; forgets those that were captured before."""
        runner = self.runner
        parameters = acl_graph.get_graph_params()
        runner.model.concrete_aclgraph_entries.clear()
        for size, events in parameters.events.items():
            events.clear()
            parameters.handles[size].clear()
            parameters.attn_params[size].clear()
            parameters.workspaces[size] = None
        _capture_model(runner)
        self.addresses = addresses_of(runner)

    def _run(self, run: Callable, has_sequences: bool, *args, **kwargs) -> torch.Tensor:
        """A step; the first captured one after `ready` asked for it without its graph, too."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not CUDAGraphMode.FULL:
            return run(*args, **kwargs)
        if not self._compares:
            if has_sequences:
                self.on_replay(context.batch_descriptor.num_tokens)
            return run(*args, **kwargs)
        self._compares = False
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        eager = run(*args, **kwargs).clone()
        context.cudagraph_runtime_mode = CUDAGraphMode.FULL
        captured = run(*args, **kwargs)
        if has_sequences:
            rows = next(iter(context.attn_metadata.values())).num_actual_tokens
            self._compare(captured[:rows].float(), eager[:rows].float())
        return captured

    def _compare(self, captured: torch.Tensor, eager: torch.Tensor) -> None:
        """Hidden states [tokens, width] of the same tokens, most of which must agree: by a rounding
        a few may choose other experts. EngineError: they do not.
        """
        apart = (captured - eager).abs().amax(-1) / eager.abs().amax(-1)
        self.difference = apart.median().item()
        if not self.difference <= TOLERANCE:
            raise EngineError(
                f"a decode step of {len(eager)} tokens computed by its graph and without it "
                f"differs by {self.difference:.3g} of a token's largest hidden state, more than "
                f"rounding ({TOLERANCE:.3g}): the graph does not compute with today's weights. "
                f"{EAGER}"
            )

    def _sync(self, sync: Callable, *args, **kwargs) -> Any:
        """Remembers what data parallel ranks tell each other before a step."""
        result = sync(*args, **kwargs)
        self._is_prefill_anywhere = result[2]
        return result

    def _dispatch(self, dispatch: Callable, descriptor: Any) -> Any:
        """No graph in a step in which another rank prefills: it would not take part in the same
        collectives. Upstream goes by the number of tokens alone (model_runner_v1.py:1939).
        """
        if self._is_prefill_anywhere:
            return CUDAGraphMode.NONE, None
        return dispatch(descriptor)


def addresses_of(runner: Any) -> dict[str, int]:
    """Returns the addresses of all that a captured step reads and writes and does not own."""
    model = runner.get_model()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for layer, caches in enumerate(runner.kv_caches):
        tensors |= {f"KV cache {layer} {number}": cache for number, cache in enumerate(caches)}
    for number, table in enumerate(runner.input_batch.block_table.block_tables):
        tensors[f"block table {number}"] = table.get_device_tensor()
    for name in ("input_ids", "positions", "slot_mapping", "reserved_mc2_mask"):
        tensors[name] = getattr(runner, name)
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
