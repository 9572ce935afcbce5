"""Decode graphs in one engine of the real vllm-ascend on emulated NPUs (test_graphs.py), of a Case
with `graphs`: greedy answers with noise that comes, changes and goes, by graphs, without them, and
beside transformers; a step in which one engine prefills while the other decodes; and, on one rank,
planted faults and what stopped each.
"""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from ascend_rollout import Case, Served, random_ids
from reference import drawn
from torch.nn import Parameter
from vllm import SamplingParams, TokensPrompt
from vllm.config import CUDAGraphMode
from vllm_ascend.compilation import acl_graph
from vllm_ascend.worker import model_runner_v1

from mindspeed_qerl.ascend import graphs as ours
from mindspeed_qerl.emulation import graphs as emulated

# step of the noise schedule, None: no noise
NOISE = {"clean": None, "noisy": 3, "other noise": 2, "clean again": None}


@contextmanager
def without_graphs(served: Served) -> Iterator[None]:
    """The same steps, filled up to the same sizes."""
    dispatcher = served.runner.aclgraph_dispatcher
    dispatch, dispatcher.dispatch = dispatcher.dispatch, lambda _: (CUDAGraphMode.NONE, None)
    yield
    dispatcher.dispatch = dispatch


def replays(served: Served) -> Counter:
    """Counts them from now on, by size."""
    counted = Counter()
    for descriptor, entry in served.runner.model.concrete_aclgraph_entries.items():
        size, replay = descriptor.num_tokens, entry.aclgraph.replay
        entry.aclgraph.replay = lambda size=size, replay=replay: counted.update([size]) or replay()
    return counted


def beside_transformers(served: Served, graphs) -> dict:
    """For each of NOISE: whether graphs answer as without them, bit for bit, and what `beside`
    says.
    """
    report, counted = {}, None
    for name, step in NOISE.items():
        served.noise(step)
        served.noise_twins()
        graphs._asked = 0  # each is compared
        graphs.ready()
        counted = replays(served) if counted is None else counted
        captured, _ = served.answers()
        with without_graphs(served):
            eager, _ = served.answers()
        report[name] = {
            "same": captured == eager,
            "answers": captured,
            "beside": served.beside(captured),
            "difference": graphs.difference,
        }
    return {"noise": report, "replayed": counted}


def prefill_beside_decode(served: Served, graphs) -> dict:
    """The second engine prefills four tokens, a captured size, while the first decodes: a fifth
    prompt waits for a place.
    """
    chosen, dispatcher = [], served.runner.aclgraph_dispatcher
    dispatch = dispatcher.dispatch

    def dispatched(descriptor):
        mode, found = dispatch(descriptor)
        chosen.append((descriptor.num_tokens, bool(descriptor.uniform_decode), mode.name))
        return mode, found

    dispatcher.dispatch = dispatched
    lengths = [9, 16, 12, 10, 4] if served.replica else [9]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in random_ids(5, *lengths)]
    sampling = SamplingParams(
        max_tokens=4 if served.replica else 10,
        temperature=0.0,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
    )

    def asked():
        served.engine.reset_prefix_cache()
        outputs = served.engine.generate(prompts, sampling, use_tqdm=False)
        return [drawn(output.outputs[0]) for output in outputs]

    captured = asked()
    steps = list(chosen)
    with without_graphs(served):
        eager = asked()
    return {"captured": captured, "eager": eager, "steps": steps}


def faults(served: Served, graphs) -> dict[str, str]:
    """What stopped each of them; "" if nothing did."""
    runner, model, report = served.runner, served.model, {}
    attention, norm = model.model.layers[1].self_attn, model.model.norm

    def repointed_weight():
        attention.o_proj.weight.data = attention.o_proj.weight.data.clone()

    def another_norm():
        norm.weight = Parameter(norm.weight.data.clone(), requires_grad=False)

    def new_parameter():
        norm.scale = Parameter(norm.weight.data.clone(), requires_grad=False)

    def another_cache():
        runner.kv_caches[1] = tuple(cache.clone() for cache in runner.kv_caches[1])

    def another_table():
        attention.rotary_emb.cos_sin_cache = attention.rotary_emb.cos_sin_cache.clone()

    def another_input(name):
        setattr(runner, name, getattr(runner, name).clone())

    def stale_copy():
        """Of the last norm's weight, of which the address was kept."""
        stale = norm.weight / 2
        for entry in runner.model.concrete_aclgraph_entries.values():
            steps = entry.aclgraph.steps
            last = [s for s in steps if getattr(s, "name", "") == "npu_add_rms_norm"][-1]
            (x, residual, _, *rest), more = last.arguments
            last.arguments = (x, residual, stale, *rest), more

    def old_lengths():
        def updated(stream, context, size):
            for metadata in context.attn_metadata.values():
                metadata.seq_lens = torch.ones_like(metadata.seq_lens)
            update_attn_params(stream, context, size)

        model_runner_v1.update_attn_params = updated

    planted = {
        "repointed_weight": repointed_weight,
        "another_norm": another_norm,
        "new_parameter": new_parameter,
        "another_cache": another_cache,
        "another_table": another_table,
        "another_input": partial(another_input, "input_ids"),
        "another_slot_mapping": partial(another_input, "slot_mapping"),
        "stale_copy": stale_copy,
        "old_lengths": old_lengths,
        "size_that_was_not_captured": runner.model.concrete_aclgraph_entries.clear,
    }
    update_attn_params = acl_graph.update_attn_params
    for name, plant in planted.items():
        caches, weight = list(runner.kv_caches), norm.weight
        plant()
        graphs._asked = 0
        try:
            graphs.ready()
            served.answers()
            report[name] = ""
        except Exception as error:  # noqa: BLE001 (whatever stopped it)
            report[name] = f"{type(error).__name__}: {error}"
        # as it was, but for memory, which is captured anew
        emulated._state.replay = emulated._state.capture = emulated._state.updated = None
        for request in list(served.engine.llm_engine.output_processor.request_states):
            served.engine.llm_engine.abort_request([request])
        model_runner_v1.update_attn_params = update_attn_params
        runner.kv_caches[:] = caches
        norm.weight = weight
        if hasattr(norm, "scale"):
            del norm.scale
        gc.collect()
        graphs.addresses = None
        graphs.ready()
        served.answers()
    return report


def main(case: Case, folder: str) -> dict:
    ours.install(max(case.graphs))  # of it, that nothing is captured before `ready`
    served = Served(case, folder)
    graphs = ours.DecodeGraphs(served.runner)
    graphs.ready()
    report = beside_transformers(served, graphs)
    if case.dp > 1:
        report["prefill"] = prefill_beside_decode(served, graphs)
    if case.tp == case.dp == 1 and case.moe:
        report["faults"] = faults(served, graphs)
    return report
