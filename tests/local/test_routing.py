"""Routing replay against transformers: what vLLM records, and what Megatron computes with the
routes of another run, transformers with those experts forced upon it.
"""

import os
from copy import deepcopy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.schedule import NoiseLevel
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.local.batch import build_batch

from .conftest import furthest, logprobs_of, make_model, recipe_of, run_ranks
from .test_megatron import (
    assembled,
    layout_config,
    move_b,
    random_batch,
    share_of,
    transformers_logprobs,
    whole_gradients,
)

FAMILIES = ("qwen3_moe", "qwen2_moe")
LAYOUTS = {  # as in test_megatron
    "one rank": (1, 1, 1, 1, False, 0),
    "one rank, recompute": (1, 1, 1, 1, False, 3),
    "EP 2": (2, 1, 1, 2, False, 0),
    "DP 2": (2, 1, 1, 1, False, 2),
    "PP 2": (2, 1, 2, 1, False, 1),
    "TP 2, EP 2": (4, 2, 1, 2, False, 1),
    "TP 2, PP 2, EP 2": (8, 2, 2, 2, False, 2),
}
DEFAULT = {("one rank", "qwen3_moe"), ("PP 2", "qwen2_moe"), ("TP 2, EP 2", "qwen3_moe")}
CASES = [
    pytest.param(layout, family, marks=[] if (layout, family) in DEFAULT else [pytest.mark.full])
    for layout in LAYOUTS
    for family in FAMILIES
]
LAYERS = 4


@pytest.fixture(scope="module")
def dirs(tmp_path_factory):
    return {
        family: make_model(family, tmp_path_factory.mktemp(family), num_hidden_layers=LAYERS)
        for family in FAMILIES
    }


def load(model_dir):
    from transformers import AutoModelForCausalLM

    # "eager": of the experts, so that a gradient is a sum that torch makes
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, experts_implementation="eager"
    )


def own_routes(model, tokens):
    """ids [batch, length, layers, top_k] that transformers chooses, and how far each token's last
    chosen expert is ahead of the next one [batch, length, layers].
    """
    found, hooks = [], []
    for layer in model.model.layers:
        hooks.append(
            layer.mlp.gate.register_forward_hook(
                lambda module, inputs, output: found.append(output[0])
            )
        )
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    top_k = model.config.num_experts_per_tok
    logits = torch.stack([logits.view(*tokens.shape, -1) for logits in found], dim=2)
    values, ids = logits.topk(top_k + 1)
    return ids[..., :top_k].numpy(), (values[..., top_k - 1] - values[..., top_k]).numpy()


def force(model, routes, known):
    """transformers' model, with `routes` [batch, length, layers, top_k] where `known` [batch,
    length].
    """

    def forced(gate, ids):
        def forward(hidden):
            logits = hidden @ gate.weight.T
            scores = logits.softmax(-1)
            own = scores.topk(ids.shape[-1], dim=-1).indices
            chosen = torch.where(known.flatten()[:, None], ids, own)
            weights = scores.gather(-1, chosen)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.forward = forced(
            layer.mlp.gate, torch.from_numpy(routes[:, :, number]).long().flatten(0, 1)
        )
    return model


def other_routes(batch, experts=8, top_k=2):
    """A batch with the routes of another run: any two experts for each token; the rest is what
    nobody may read.
    """
    rng = np.random.default_rng(5)
    routes = (
        rng.random((*batch.mask.shape, LAYERS, experts)).argsort(-1)[..., :top_k].astype(np.uint8)
    )
    routes[np.arange(batch.mask.shape[1]) >= batch.lengths[:, None] - 1] = (
        3  # duplicate ids in the padding
    )
    return replace(batch, routes=routes)


def forced_model(model_dir, batch):
    """transformers with the routes of a batch, which all tokens but the last of each row have."""
    length = batch.tokens.shape[1]
    known = np.arange(length) < batch.lengths[:, None] - 1
    return force(
        load(model_dir),
        np.pad(batch.routes, ((0, 0), (0, 1), (0, 0), (0, 0))),
        torch.from_numpy(known),
    )


# ---- Megatron ----


def replay_rank(start, config):
    """Log-probs and the gradients of one update with the routes of another run, and the same with
    its own routes.
    """
    from megatron.core import parallel_state

    batch = other_routes(random_batch())
    trainer = start(config)
    rows, shard = share_of(trainer, batch)
    move_b(trainer)
    factors = deepcopy(trainer.adapter_factors())  # training changes what it names
    result = {
        "rows": rows if parallel_state.is_pipeline_last_stage() else [],
        "factors": factors,
        "logprobs": trainer.logprobs(shard),
        "own": trainer.logprobs(replace(shard, routes=None)),
        "reference": trainer.logprobs(shard, reference=True),
        "metrics": trainer.train(batch),
        "gradients": {},
    }
    for mapping, (a, b) in whole_gradients(trainer):
        parts = [part.clone() for part in mapping.split(b)]
        result["gradients"][mapping.hf] = (a.clone(), parts)
    return result


@pytest.fixture(scope="module")
def results(dirs, data_dir):
    @cache
    def of(layout, family):
        config = layout_config(
            LAYOUTS[layout],
            dirs[family],
            data_dir,
            rl_config__init_kl_coef=0.0,
            actor_config__clip_grad=0.0,
            algorithm__routing_replay="rollout",
        )
        return run_ranks(replay_rank, config.layout.world, config)

    return of


@pytest.fixture(scope="module")
def oracle(dirs, results):
    """Of transformers with the experts forced and the adapters merged: log-probs, and gradients of
    every weight.
    """

    @cache
    def of(family):
        batch = other_routes(random_batch())
        model = forced_model(dirs[family], batch)
        factors = {
            name: entry
            for result in results("one rank", family)
            for name, entry in result["factors"].items()
        }
        add_adapters(model, factors)
        tokens, mask = torch.from_numpy(batch.tokens), torch.from_numpy(batch.mask)
        logprobs = logprobs_of(model, tokens)
        gain = torch.from_numpy(batch.advantages)[:, None] * (logprobs - logprobs.detach()).exp()
        (-(gain * mask).sum() / mask.sum()).backward()
        return dict(
            logprobs=logprobs.detach().numpy() * batch.mask,
            weights=hf_gradients(model),
            batch=batch,
            factors=factors,
        )

    return of


def weights_of(model, tensors):
    """HF name -> part of the fused tensors that transformers 5 has for experts;
    `tensors(parameter)` of each.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.experts.gate_up_proj"):
            for expert, both in enumerate(tensors(parameter)):
                for part, value in zip(("gate", "up"), both.chunk(2)):
                    yield name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), value
        elif name.endswith("mlp.experts.down_proj"):
            for expert, value in enumerate(tensors(parameter)):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), value
        else:
            yield name, tensors(parameter)


def add_adapters(model, factors):
    held = dict(weights_of(model, lambda parameter: parameter.data))
    for name, (_, b, a) in factors.items():
        held[name] += torch.from_numpy(b) @ torch.from_numpy(a)


def hf_gradients(model):
    return dict(weights_of(model, lambda parameter: parameter.grad))


@pytest.mark.parametrize("layout, family", CASES)
def test_other_routes_give_the_logprobs_of_transformers_with_those_experts(
    results, oracle, dirs, layout, family
):
    ranks, expected, batch = results(layout, family), oracle(family), other_routes(random_batch())
    assert furthest(assembled(ranks, "logprobs", batch), expected["logprobs"]) < 1e-5
    own = load(dirs[family])
    base = transformers_logprobs(own, batch) * batch.mask
    assert furthest(assembled(ranks, "reference", batch), base) < 1e-5  # its own routes
    add_adapters(own, expected["factors"])
    assert (
        furthest(assembled(ranks, "own", batch), transformers_logprobs(own, batch) * batch.mask)
        < 1e-5
    )
    assert (
        furthest(expected["logprobs"], assembled(ranks, "own", batch)) > 0.1
    )  # the routes were other ones


@pytest.mark.parametrize("layout, family", CASES)
def test_gradients_are_those_of_transformers_with_those_experts(results, oracle, layout, family):
    ranks, expected = results(layout, family), oracle(family)
    scaling, seen = 2.0, set()  # alpha / r
    for result in ranks:
        for names, (a_gradient, b_gradients) in result["gradients"].items():
            a_expected = 0
            for name, b_gradient in zip(names, b_gradients, strict=True):
                _, b, a = expected["factors"][name]  # b has the scaling in it
                of_weight = expected["weights"][name].double()
                b_expected = scaling * of_weight @ torch.from_numpy(a).double().T
                a_expected = a_expected + torch.from_numpy(b).double().T @ of_weight
                assert (b_gradient - b_expected).norm() <= 1e-5 * b_expected.norm(), name
                seen.add(name)
            assert (a_gradient - a_expected).norm() <= 1e-5 * a_expected.norm(), names
    assert seen == set(expected["factors"])


@pytest.mark.parametrize("layout, family", CASES)
def test_each_token_but_the_last_is_replayed_once_in_every_layer(results, layout, family):
    batch = random_batch()
    for result in results(layout, family):
        metrics = result["metrics"]
        assert metrics["routing/replayed_tokens"] == (batch.lengths - 1).sum()
        assert metrics["routing/native_tokens"] >= len(batch)
        flipped = [metrics[f"routing/flipped/layer_{layer}"] for layer in range(LAYERS)]
        assert metrics["routing/flipped"] == pytest.approx(np.mean(flipped))
        # two of eight at random: 3/4 are other ones
        assert all(0.6 < share < 0.9 for share in flipped)


# ---- vLLM ----


def start(model_dir, **more):
    """vLLM in this process, and a recorder of its routes."""
    from mindspeed_qerl.local.packing import keep_linear_weights
    from mindspeed_qerl.local.serving import route_recorder, start_vllm

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="2")
    keep_linear_weights()
    llm = start_vllm(
        str(model_dir),
        "float32",
        96,
        kv_cache_gib=1,
        logprobs_mode="processed_logprobs",
        seed=0,
        **more,
    )
    return llm, route_recorder(llm, read_shape(model_dir).routers, 96)


def prompts(sizes):
    rng = np.random.default_rng(2)
    return [rng.integers(0, 96, size).tolist() for size in sizes]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_routes_are_those_of_transformers(dirs, family):
    """Under noise; prompts come in chunks, and some requests are preempted."""
    from mindspeed_qerl.local.serving import complete

    llm, recorder = start(
        dirs[family],
        max_num_seqs=8,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=6,
        block_size=32,
    )
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *given, **named: (
        preempted.append(given),
        preempt(*given, **named),
    )
    noise = NoiseLevel(step=5, stage=5, sigma=0.1)
    NoiseInjector(llm.apply_model(lambda model: model)[0], seed=3).apply(noise)
    asked = prompts((30, 9, 3, 26, 14))
    found = complete(
        llm, asked, recorder=recorder, n=3, max_tokens=50, temperature=1.0, stop_token_ids=[2]
    )
    model = load(dirs[family])
    NoiseInjector(model, seed=3).apply(noise)
    clear_ones = []
    for answer in found:
        whole = answer.prompt + answer.token_ids
        ids, margin = own_routes(model, torch.tensor([whole[:-1]]))
        clear = margin[0] > 1e-4  # rounding decides the others
        assert answer.routes.shape == ids[0].shape and answer.routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(answer.routes)[clear], np.sort(ids[0])[clear])
        clear_ones.append(clear.flatten())
    assert np.concatenate(clear_ones).mean() > 0.99
    assert preempted and max(map(len, asked)) > 24
    assert complete(llm, asked, n=1, max_tokens=2)[0].routes is None


def agree_rank(start, config, batch):
    """Log-probs of answers along vLLM's routes, and what the trainer would choose otherwise."""
    trainer = start(config)
    return trainer.logprobs(batch), trainer.train(batch)


def test_the_trainer_goes_where_vllm_went_with_every_token_of_a_thousand_answers(dirs, data_dir):
    from mindspeed_qerl.local.serving import complete

    llm, recorder = start(dirs["qwen3_moe"], max_num_seqs=64)
    asked = prompts(np.arange(125) % 20 + 3)
    torch.manual_seed(0)
    batch = build_batch(
        complete(
            llm, asked, recorder=recorder, n=8, max_tokens=24, temperature=1.0, stop_token_ids=[2]
        )
    )
    config = recipe_of(
        dirs["qwen3_moe"],
        data_dir,
        rl_config__actor_resource__num_npus=1,
        rl_config__mini_batch_size=125,
        megatron_training__global_batch_size=125,
        actor_config__expert_model_parallel_size=1,
        algorithm__routing_replay="rollout",
    )
    [(logprobs, metrics)] = run_ranks(agree_rank, 1, config, batch)
    assert np.abs((logprobs - batch.rollout_logprobs)[batch.mask]).max() < 1e-5
    assert metrics["routing/replayed_tokens"] == (batch.lengths - 1).sum() > 20_000
    assert metrics["routing/flipped"] == 0
    assert len(np.unique(batch.routes)) == 8
