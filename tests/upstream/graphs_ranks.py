"""Decode graphs in one engine of the real vllm-ascend on emulated NPUs, a process for each rank
(test_graphs.py).

    torchrun graphs_ranks.py CASE FOLDER RESULTS    CASE: of ascend_rollout.py, with `graphs`

Greedy answers with noise that comes, changes and goes, by graphs, without them, and beside
transformers; a step in which one engine prefills while the other decodes; and, on one rank, planted
faults and what stopped each.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ascend_rollout import SIGMA, Case, Served, random_ids

# step of the noise schedule, None: no noise
NOISE = {"clean": None, "noisy": 3, "other noise": 2, "clean again": None}


@contextmanager
def without_graphs(served: Served) -> Iterator[None]:
    """The same steps, filled up to the same sizes."""
    from vllm.config import CUDAGraphMode

    dispatcher = served.runner.aclgraph_dispatcher
    dispatch, dispatcher.dispatch = dispatcher.dispatch, lambda _: (CUDAGraphMode.NONE, None)
    yield
    dispatcher.dispatch = dispatch


def replays(served: Served) -> dict[int, int]:
    """Counts them from now on, by size."""
    counted = {}
    for descriptor, entry in served.runner.model.concrete_aclgraph_entries.items():
        size, replay = descriptor.num_tokens, entry.aclgraph.replay

        def counting(size=size, replay=replay):
            counted[size] = counted.get(size, 0) + 1
            replay()

        entry.aclgraph.replay = counting
    return counted


def beside_transformers(served: Served, graphs, folder: str) -> dict:
    """For each of NOISE: whether graphs answer as without them, bit for bit, and the largest
    distance from transformers in float32, and of its bfloat16 from that.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mindspeed_qerl.aqn.injector import NoiseInjector
    from mindspeed_qerl.aqn.schedule import NoiseSchedule

    schedule = NoiseSchedule(sigma_start=SIGMA, sigma_end=SIGMA / 2, num_stages=3, total_steps=4)
    injector = NoiseInjector(served.model, seed=1)
    twins = [
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    report, counted = {}, None
    for name, step in NOISE.items():
        if step is None:
            injector.remove()
        else:
            injector.apply(schedule.level(step))
        for twin in twins:
            weights = dict(twin.named_parameters())
            for target in injector.targets:
                weights[f"{target.name}.weight"].data.copy_(target.module.weight)
        graphs._asked = 0  # each is compared
        graphs.ready()
        counted = replays(served) if counted is None else counted
        captured, _ = served.answers()
        with without_graphs(served):
            eager, _ = served.answers()
        distances = (
            served.distance(captured, twins[0]),
            served.distance(captured, twins[1], twins[0]),
        )
        report[name] = {
            "same": captured == eager,
            "answers": captured,
            "beside": [distance.max().item() for distance in distances],
            "difference": graphs.difference,
        }
    return {"noise": report, "replayed": counted}


def prefill_beside_decode(served: Served, graphs) -> dict:
    """The second engine prefills four tokens, a captured size, while the first decodes: a fifth
    prompt waits for a place.
    """
    from vllm import SamplingParams, TokensPrompt

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
        from reference import drawn

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
    import gc

    import torch
    from vllm_ascend.compilation import acl_graph
    from vllm_ascend.worker import model_runner_v1

    from mindspeed_qerl.emulation import graphs as emulated

    runner, model, report = served.runner, served.model, {}
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[0].mlp

    def clone(parameter):
        return torch.nn.Parameter(parameter.data.clone(), requires_grad=False)

    def repointed_weight():
        attention.o_proj.weight.data = attention.o_proj.weight.data.clone()

    def stale_gate():
        mlp.gate.weight = clone(mlp.gate.weight)

    def repointed_experts():
        mlp.experts.w2_weight.data = mlp.experts.w2_weight.data.clone()

    def noise_in_the_old_buffer():
        old = model.model.norm.weight.data
        model.model.norm.weight.data = old.clone()
        old.add_(SIGMA)

    def another_norm():
        model.model.norm.weight = clone(model.model.norm.weight)

    def new_parameter():
        model.model.norm.scale = clone(model.model.norm.weight)

    def freed_cache():
        runner.kv_caches[0][0].untyped_storage().resize_(0)

    def another_cache():
        runner.kv_caches[1] = tuple(cache.clone() for cache in runner.kv_caches[1])

    def another_table():
        attention.rotary_emb.cos_sin_cache = attention.rotary_emb.cos_sin_cache.clone()

    def another_input():
        runner.input_ids = runner.input_ids.clone()

    def another_slot_mapping():
        runner.slot_mapping = runner.slot_mapping.clone()

    def steps(name):
        for entry in runner.model.concrete_aclgraph_entries.values():
            found = [step for step in entry.aclgraph.steps if getattr(step, "name", "") == name]
            yield entry.aclgraph.steps, found[-1]

    def stale_copy():
        """Of the last norm's weight, of which the address was kept."""
        stale = model.model.norm.weight / 2
        for _, step in steps("npu_add_rms_norm"):
            (x, residual, _, *rest), more = step.arguments
            step.arguments = (x, residual, stale, *rest), more

    def lost_operator():
        for recorded, step in steps("npu_swiglu"):
            recorded.remove(step)

    def old_lengths():
        update = acl_graph.update_attn_params

        def updated(stream, context, size):
            for metadata in context.attn_metadata.values():
                metadata.seq_lens = torch.ones_like(metadata.seq_lens)
            update(stream, context, size)

        model_runner_v1.update_attn_params = updated

    def lost_update():
        model_runner_v1.update_attn_params = lambda *arguments: None

    def size_that_was_not_captured():
        runner.model.concrete_aclgraph_entries.clear()

    def raising(function):
        def forward(x, *arguments, **more):
            function(x)
            return type(mlp).forward(mlp, x, *arguments, **more)

        mlp.forward = forward
        graphs.addresses = None

    def captured_host_read():
        raising(lambda x: x.sum().item())

    def captured_shape():
        raising(lambda x: x.nonzero())

    def captured_copy_to_the_host():
        raising(lambda x: x.cpu())

    planted = [
        repointed_weight,
        stale_gate,
        repointed_experts,
        noise_in_the_old_buffer,
        another_norm,
        new_parameter,
        freed_cache,
        another_cache,
        another_table,
        another_input,
        another_slot_mapping,
        stale_copy,
        lost_operator,
        old_lengths,
        lost_update,
        size_that_was_not_captured,
        captured_host_read,
        captured_shape,
        captured_copy_to_the_host,
    ]
    update_attn_params = acl_graph.update_attn_params
    for plant in planted:
        caches, norm = list(runner.kv_caches), model.model.norm.weight
        held = [cache.untyped_storage().nbytes() for cache in caches[0]]
        plant()
        graphs._asked = 0
        try:
            graphs.ready()
            served.answers()
            report[plant.__name__] = ""
        except Exception as error:  # noqa: BLE001 (whatever stopped it)
            report[plant.__name__] = f"{type(error).__name__}: {error}"
        # as it was, but for memory, which is captured anew
        emulated._state.replay = emulated._state.capture = emulated._state.updated = None
        for request in list(served.engine.llm_engine.output_processor.request_states):
            served.engine.llm_engine.abort_request([request])
        model_runner_v1.update_attn_params = update_attn_params
        runner.kv_caches[:] = caches
        for cache, size in zip(caches[0], held):
            cache.untyped_storage().resize_(size)
        model.model.norm.weight = norm
        for owner, name in ((model.model.norm, "scale"), (mlp, "forward")):
            if name in vars(owner) | getattr(owner, "_parameters", {}):
                delattr(owner, name)
        gc.collect()
        graphs.addresses = None
        graphs.ready()
        served.answers()
    return report


def main(case: Case, folder: str, results: str) -> None:
    import torch_npu  # noqa: F401
    import vllm_ascend  # noqa: F401

    from mindspeed_qerl.ascend import graphs as ours

    ours.install(max(case.graphs))  # of it, that nothing is captured before `ready`
    served = Served(case, folder)
    graphs = ours.DecodeGraphs(served.runner)
    graphs.ready()
    report = beside_transformers(served, graphs, folder)
    report["methods"] = type(served.runner).__name__
    if case.dp > 1:
        report["prefill"] = prefill_beside_decode(served, graphs)
    if case.tp == case.dp == 1 and case.moe:
        report["faults"] = faults(served, graphs)
    served.write(results, report)


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), *sys.argv[2:])
