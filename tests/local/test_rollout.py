"""What vLLM really computes after a sync, with and without noise, against transformers on the same
weights.
"""

import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.schedule import NoiseLevel, draw_numbers
from mindspeed_qerl.aqn.targets import select_targets
from mindspeed_qerl.ascend.proof import TARGETS
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.base import Llama3Rope
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.local import limits
from mindspeed_qerl.local.packing import PackedLinear
from mindspeed_qerl.local.rollout import RolloutEngine, RolloutRequest
from mindspeed_qerl.local.serving import check_built, model_runner
from mindspeed_qerl.lora.rounding import dither_of, rounded
from tests.upstream.reference import scored_by_draws

from .conftest import (
    FAMILIES,
    FEW_FAMILIES,
    NARROW,
    engine_logprobs,
    furthest,
    logprobs_of,
    make_model,
)

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.usefixtures("expert_group")

NOISE = NoiseLevel(step=5, stage=5, sigma=0.1)
SAMPLING = dict(max_tokens=6, temperature=1.0, stop_token_ids=[2])


@pytest.fixture(scope="module", params=FEW_FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(model_dirs, family):
    return model_dirs[family]


@pytest.fixture(scope="module")
def engine(model_dir):
    os.environ["OMP_NUM_THREADS"] = "2"
    return noisy_engine(model_dir, "float32")


def noisy_engine(model_dir, dtype, **options):
    return RolloutEngine(str(model_dir), dtype, 64, 16, 1, noise=dict(seed=3), **options)


def sample(engine, prompts, n, seed, sampling=SAMPLING, **more):
    return engine.generate(RolloutRequest(prompts, n, seed, sampling, **more))


def reference_model(model_dir, weights=None):
    """transformers' model of `model_dir` with `weights` in the place of its own."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {**load_file(model_dir / "model.safetensors"), **(weights or {})},
            f"{folder}/model.safetensors",
            {"format": "pt"},
        )
        shutil.copy(model_dir / "config.json", folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.requires_grad_(False)


def test_the_kv_cache_holds_every_sequence_and_not_a_gibibyte(engine):
    cache = engine.llm.llm_engine.vllm_config.cache_config
    assert 16 * 64 < cache.num_gpu_blocks * cache.block_size  # one block is nobody's
    assert cache.kv_cache_memory_bytes < 2**24


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"rope_theta": 2e6}, "rope_theta 1000000.0 in vLLM, 2000000.0 in training"),
        ({"head_dim": 64}, "rotary width 32 in vLLM, 64"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-06 in vLLM, 1e-05"),
        (
            {"rope_scaling": Llama3Rope(4.0, 1.5, 4.5, 64)},
            "RotaryEmbedding.*, .(None|8.0), .* in vLLM, .'Llama3RotaryEmbedding', .4.0",
        ),
        ({"model_type": None}, "architecture "),
    ],
)
def test_what_vllm_built_is_compared_with_what_ranks_build(
    engine, model_dir, family, changed, words
):
    shape = read_shape(model_dir)
    check_built(engine.model, shape)
    if "model_type" in changed:
        changed = {"model_type": next(name for name in FAMILIES if name != family)}
    with pytest.raises(ConfigError, match=f"^config.json is not read alike: .*{words}"):
        check_built(engine.model, replace(shape, **changed))


def sequences():
    return np.random.default_rng(1).integers(0, 96, (6, 20)).tolist()


def reference_logprobs(model):
    return logprobs_of(model, torch.tensor(sequences())).numpy()


def changed_weights(model_dir, seed=0):
    """Every attention and expert weight moved, as a sync after an update would."""
    generator, checkpoint = torch.Generator().manual_seed(seed), Checkpoint(model_dir)
    return {
        name: checkpoint.read(name)
        + 0.05 * torch.randn(checkpoint.read(name).shape, generator=generator)
        for name in checkpoint.files
        if name.endswith("_proj.weight")
    }


def sync(engine, weights):
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    names = sorted(arrays)
    engine.start_sync()
    # two parts, each from two ranks
    engine.load(
        {name: arrays[name] for name in names[::4]}, {name: arrays[name] for name in names[1::4]}
    )
    engine.load(
        {name: arrays[name] for name in names[2::4]}, {name: arrays[name] for name in names[3::4]}
    )
    engine.finish_sync()


def test_logprobs_after_a_sync_are_transformers_with_the_same_noise_and_without(engine, model_dir):
    weights = changed_weights(model_dir)
    sync(engine, weights)
    model = reference_model(model_dir, weights)
    clean = reference_logprobs(model)
    NoiseInjector(model, seed=3).apply(NOISE)
    noisy = reference_logprobs(model)
    assert furthest(engine_logprobs(engine, sequences(), noise=NOISE), noisy) < 1e-5
    # and it is gone again
    assert furthest(engine_logprobs(engine, sequences()), clean) < 1e-5
    assert furthest(noisy, clean) > 0.01
    # the sync was worth testing
    assert furthest(clean, reference_logprobs(reference_model(model_dir))) > 0.05


@pytest.mark.parametrize(
    "name",
    [
        name if name == "Llama-3.2-1B" else pytest.param(name, marks=pytest.mark.full)
        for name in NARROW
    ],
)
def test_so_they_are_with_the_ratios_of_public_models(model_dirs, name):
    engine = noisy_engine(model_dirs[name], "float32")
    check_built(engine.model, read_shape(model_dirs[name]))
    test_logprobs_after_a_sync_are_transformers_with_the_same_noise_and_without(
        engine, model_dirs[name]
    )


def assert_answers_are_of_the_noisy_policy(engine):
    """By their logprobs; the prompts, and the report of the noise."""
    prompts = [row[:8] for row in sequences()]
    answers, report = sample(engine, prompts, 2, seed=4, noise=NOISE)
    assert report.sigma == NOISE.sigma
    whole = [answer.prompt + answer.token_ids for answer in answers]
    scored = engine_logprobs(engine, whole, noise=NOISE)
    for answer, logprobs in zip(answers, scored, strict=True):
        np.testing.assert_allclose(answer.logprobs, logprobs[len(answer.prompt) - 1 :], atol=1e-5)
    return prompts, report


def test_an_answers_logprobs_are_at_its_temperature_and_it_ends_where_it_says(engine, model_dir):
    """Those of transformers; an answer that was not cut off has its end token, one that was has all
    it may have.
    """
    weights, prompts = changed_weights(model_dir), [row[:8] for row in sequences()]
    sync(engine, weights)
    answers, _ = sample(engine, prompts, 16, seed=4, sampling={**SAMPLING, "temperature": 2.0})
    # what comes after an answer changes nothing in it
    tokens = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(answer.prompt + answer.token_ids) for answer in answers], batch_first=True
    )
    logprobs = logprobs_of(reference_model(model_dir, weights), tokens, temperature=2.0)[:, 7:]
    for answer, expected in zip(answers, logprobs):
        expected = expected[: len(answer.token_ids)]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-5)
        assert (answer.token_ids[-1] == 2) != answer.is_truncated
        assert len(answer.token_ids) == SAMPLING["max_tokens"] or not answer.is_truncated
    assert {answer.is_truncated for answer in answers} == {True, False}


@pytest.fixture
def computed(engine):
    """Tokens of each pass, counted where they enter the model."""
    passes = []
    hook = engine.model.model.embed_tokens.register_forward_hook(
        lambda *call: passes.append(len(call[2]))
    )
    yield passes
    hook.remove()


def test_a_prompt_is_computed_once_for_its_answers_and_anew_by_other_weights(
    engine, model_dir, computed
):
    """Logprobs of answers are transformers', whatever the call before had cached of the same
    prompts: other weights, or the same with noise.
    """
    prompts = np.random.default_rng(5).integers(3, 96, (3, 40)).tolist()
    sampling = dict(max_tokens=6, temperature=1.0, ignore_eos=True)
    for seed, noise in ((6, NOISE), (6, None), (7, None)):
        weights = changed_weights(model_dir, seed)
        sync(engine, weights)
        computed.clear()
        answers, _ = sample(engine, prompts, 4, 1, sampling, noise=noise)
        # 32 of a prompt's 40 tokens once, the rest and all but an answer's last token for each of
        # its four answers
        assert sum(computed) == 3 * (32 + 4 * (8 + 6 - 1))
        if noise is None:
            tokens = torch.tensor([answer.prompt + answer.token_ids for answer in answers])
            logprobs = logprobs_of(reference_model(model_dir, weights), tokens)[:, 39:]
            np.testing.assert_allclose([a.logprobs for a in answers], logprobs, atol=1e-5)
    computed.clear()
    sample(engine, prompts, 4, 1, sampling, hardware_error=dict(kinds=["gaussian"]))
    # on other hardware each answer has errors of its own
    assert sum(computed) == 3 * 4 * (40 + 6 - 1)


def test_noise_free_sampling_is_bit_identical_to_an_engine_without_aqn(engine, model_dir):
    """Sampled by an engine that has no injector, then by one that has just sampled with noise."""
    sync(engine, changed_weights(model_dir))
    prompts = [row[:8] for row in sequences()]
    injector, engine.injector = engine.injector, None
    try:
        without_aqn, _ = sample(engine, prompts, 4, seed=9)
    finally:
        engine.injector = injector
    noisy, _ = sample(engine, prompts, 4, seed=9, noise=NOISE)
    with_aqn, report = sample(engine, prompts, 4, seed=9)
    assert report is None
    assert with_aqn == without_aqn != noisy
    assert sample(engine, prompts, 4, seed=10)[0] != with_aqn
    engine.injector.apply(NOISE)
    with pytest.raises(RuntimeError, match="the noise of an earlier call is still on"):
        sample(engine, prompts, 4, seed=9)
    engine.injector.remove()


# ---- a draw of the noise for each answer, or for each group ----


@pytest.fixture
def crowded(engine, monkeypatch):
    """Makes an injector with draws of its own the engine's, and the engine a crowded one: prompts
    come in chunks of 16 tokens, keys and values of five blocks of 32 are there, so that requests
    are preempted; or with more room. Returns the list of preempted requests.
    """
    runner = model_runner(engine.llm)
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    taken, preempted = [], []

    def reset(blocks):
        pool.free_blocks(taken)
        taken.clear()
        done = type(engine.llm).reset_prefix_cache(engine.llm)
        taken.extend(pool.get_new_blocks(pool.get_num_free_blocks() - blocks))
        return done

    def preempt(request, *arguments, **more):
        preempted.append(request.request_id)
        return type(scheduler)._preempt_request(scheduler, request, *arguments, **more)

    def crowd(draws, blocks=5, tokens=16):
        emptied = partial(reset, blocks)
        monkeypatch.setattr(engine.llm, "reset_prefix_cache", emptied, raising=False)
        monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", tokens)
        injector = NoiseInjector(engine.model, seed=3, draws=draws, runner=runner)
        monkeypatch.setattr(engine, "injector", injector)
        return preempted

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    yield crowd
    pool.free_blocks(taken)


ROW = np.random.default_rng(5).integers(3, 96, 60).tolist()
# beginning alike, so that a prefix cache that draws shared would be hit
PROMPTS = [ROW[:20], ROW[:28], ROW[:40], ROW[:36] + ROW[50:54]]


def sample_with_draws(engine, draws):
    """Eight answers, and the draw of each."""
    numbers = draw_numbers(draws, prompts=4, n=2)
    sampling = dict(max_tokens=20, temperature=1.0, ignore_eos=True)
    answers, report = sample(engine, PROMPTS, 2, 1, sampling, noise=NOISE, draws=numbers)
    assert report.measured_std == pytest.approx(NOISE.sigma, rel=0.2)
    return answers, numbers


def apart_from_own_draw(model_dir, answers, numbers):
    """By how much each answer's log-probs differ from transformers' with the noise of its draw."""
    model = reference_model(model_dir, changed_weights(model_dir))
    clean = {name: norm.weight.detach().clone() for name, norm in select_targets(model).items()}
    asked = [(answer.prompt, answer.token_ids) for answer in answers]
    own = scored_by_draws(model, clean, 3, NOISE, asked, numbers)
    return [furthest(answer.logprobs, expected.numpy()) for answer, expected in zip(answers, own)]


@pytest.mark.parametrize("draws, room", [("answer", ()), ("group", ()), ("answer", (16, 256))])
def test_each_answer_is_of_its_own_draw(engine, model_dir, crowded, computed, draws, room):
    preempted = crowded(draws, *room)
    sync(engine, changed_weights(model_dir))
    clean = sample(engine, PROMPTS, 1, seed=4)[0]
    computed.clear()
    answers, numbers = sample_with_draws(engine, draws)
    assert max(apart_from_own_draw(model_dir, answers, numbers)) < 1e-5
    # of another draw they are not
    other = [*numbers[2:], *numbers[:2]]
    assert min(apart_from_own_draw(model_dir, answers, other)) > 0.01
    if room:  # all eight at once
        assert computed == [256] + 19 * [8] and not preempted
    else:
        assert preempted and max(computed) <= 16
    # of answers each token is computed, of groups what is shared once
    tokens = sum(len(answer.prompt) + 20 - 1 for answer in answers)
    assert (sum(computed) < tokens) == (draws == "group")
    # the same request has the same answers, and it is gone again
    assert sample_with_draws(engine, draws)[0] == answers
    assert sample(engine, PROMPTS, 1, seed=4)[0] == clean


@pytest.mark.parametrize("fault", ["a row further", "a dummy's", "shared cache"])
def test_a_fault_of_draws_shows_in_log_probs(engine, model_dir, crowded, monkeypatch, fault):
    crowded("answer")
    sync(engine, changed_weights(model_dir))
    rows = engine.injector.rows
    fill = rows._fill

    def filled(scheduled):
        fill(scheduled)
        if fault == "a row further":
            rows.index.copy_(rows.index.roll(1))
        elif fault == "a dummy's":
            rows.index[sum(scheduled.values()) - 1] = 0

    monkeypatch.setattr(rows, "_fill", filled)
    if fault == "shared cache":
        monkeypatch.setattr("mindspeed_qerl.aqn.rows.salt_of", lambda draw: "all")
    assert max(apart_from_own_draw(model_dir, *sample_with_draws(engine, "answer"))) > 0.01


def factors(model_dir, seed):
    """Random (alpha/r) B and A for every adapted tensor, and the weights they lead to."""
    generator = torch.Generator().manual_seed(seed)
    checkpoint = Checkpoint(model_dir)
    result, weights = {}, {}
    for name in checkpoint.files:
        if name.endswith("_proj.weight"):
            base = checkpoint.read(name)
            b = torch.randn(base.shape[0], 4, generator=generator) * 0.1
            a = torch.randn(4, base.shape[1], generator=generator) * 0.1
            result[name] = (TARGETS[name.split(".")[-2]], b.numpy(), a.numpy())
            dither = dither_of(name, base.shape)
            weights[name] = rounded(base.float() + b @ a, base.dtype, dither).float()
    return result, weights


def test_movement_proves_each_target_to_rounding(engine, model_dir, family):
    lora, weights = factors(model_dir, 0)
    sync(engine, weights)
    movement = engine.movement(lora)
    for target, entry in movement.items():
        assert entry["max_error"] <= 2 * entry["resolution"], target
        assert entry["moved"] == pytest.approx(entry["expected"], rel=1e-5)
        assert entry["expected"] > 0.1
    mlps = {"qwen3_moe": 16, "qwen2_moe": 18}.get(family, 2)
    assert {target: entry["tensors"] for target, entry in movement.items()} == {
        "linear_qkv": 6,
        "linear_proj": 2,
        "linear_fc1": 2 * mlps,
        "linear_fc2": mlps,
    }


@pytest.mark.parametrize(
    "lost, target",
    [
        ("layers.1.self_attn.k_proj", "linear_qkv"),
        ("layers.0.self_attn.o_proj", "linear_proj"),
        ("layers.0.mlp.up_proj", "linear_fc1"),
        ("layers.1.mlp.experts.7.down_proj", "linear_fc2"),
        ("layers.0.mlp.experts.5.up_proj", "linear_fc1"),
        ("layers.1.mlp.shared_expert.gate_proj", "linear_fc1"),
    ],
)
def test_movement_shows_a_single_lost_tensor(engine, model_dir, lost, target):
    lora, weights = factors(model_dir, 1)
    name = f"model.{lost}.weight"
    if name not in weights:
        pytest.skip("another family's")
    sync(engine, {**weights, name: Checkpoint(model_dir).read(name)})
    movement = engine.movement(lora)
    assert {t for t, entry in movement.items() if entry["max_error"] > 2 * entry["resolution"]} == {
        target
    }
    assert movement[target]["lost"] == pytest.approx(1, rel=1e-3)
    assert all(entry["lost"] < 1e-3 for t, entry in movement.items() if t != target)


def test_movement_is_of_what_the_kernels_compute_with(engine, model_dir, monkeypatch):
    """Packed copies that do not follow their weights are lost tensors."""
    lora, weights = factors(model_dir, 2)
    sync(engine, {name: Checkpoint(model_dir).read(name) for name in lora})
    engine.movement(lora)
    with monkeypatch.context() as broken:
        broken.setattr(PackedLinear, "forget", lambda packed: None)
        sync(engine, weights)
        movement = engine.movement(lora)
        assert [
            movement[target]["lost"] for target in ("linear_qkv", "linear_proj")
        ] == pytest.approx([1, 1])
    sync(engine, weights)
    assert all(
        entry["max_error"] <= 2 * entry["resolution"] for entry in engine.movement(lora).values()
    )


# What oneDNN may use, as an older processor: bfloat16 and float16 have no products of its below
# AVX-512.
ISAS = [
    "AVX2",
    pytest.param(
        "DEFAULT",
        marks=pytest.mark.skipif(
            not torch.cpu._is_avx512_supported(),
            reason="a processor without AVX-512: the same as AVX2",
        ),
    ),
]
HALVES = {
    "qwen2_moe": dict(num_experts_per_tok=8),  # all: no rounding can change a route
    "qwen3": dict(hidden_size=72, intermediate_size=50, vocab_size=97),
}


def layers_and_engines_of_a_processor(rank, models, path):
    """What `PackedLinear` computes by dtype, width and bias, and bfloat16 engines after a sync, and
    after one that missed a tensor.
    """
    from vllm.platforms import current_platform

    # vLLM's kernels use AMX tiles, and with oneDNN held back nobody asks Linux for them
    torch.cpu._init_amx()
    engines = {}
    for family, model_dir in models.items():
        engine = noisy_engine(model_dir, "bfloat16")
        lora, weights = factors(model_dir, 0)
        sync(engine, weights)
        engines[family] = {
            "movement": engine.movement(lora),
            "logprobs": engine_logprobs(engine, sequences()),
            "answers": sample(engine, [row[:8] for row in sequences()], 2, 4, noise=NOISE)[0],
        }
        lost = "model.layers.1.self_attn.o_proj.weight"
        sync(engine, {**weights, lost: Checkpoint(model_dir).read(lost).float()})
        engines[family]["after_a_loss"] = engine.movement(lora)
    current_platform.import_kernels()
    generator, layers = torch.Generator().manual_seed(0), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width_out, width_in, bias in (
            (64, 96, False),
            (33, 47, True),
            (1, 72, True),
            (200, 1, False),
        ):
            x, weight, other, b = (
                torch.randn(shape, generator=generator).to(dtype)
                for shape in (
                    (5, width_in),
                    (width_out, width_in),
                    (width_out, width_in),
                    (width_out,),
                )
            )
            layer, b = PackedLinear(), b if bias else None
            held = partial(layer, torch.eye(width_in, dtype=dtype))  # as lora/held.py reads it
            result = {
                "x": x,
                "weight": weight.clone(),
                "bias": b,
                "y": layer(x, weight, b),
                "packed": layer.dtype,
                "held": held(weight).t(),
            }
            weight.copy_(other)
            result |= {"stale_y": layer(x, weight), "stale_held": held(weight).t()}
            layer.forget()
            layers.append(
                {**result, "next": other, "next_y": layer(x, weight), "next_held": held(weight).t()}
            )
    torch.save({"engines": engines, "layers": layers}, path)
    os._exit(0)


@pytest.fixture(scope="module", params=ISAS)
def processor(request, tmp_path_factory):
    """(what oneDNN may use, the models, what was computed there)."""
    folder, models = tmp_path_factory.mktemp("processor"), {}
    for name, changes in HALVES.items():
        models[name] = make_model(name, folder / name, dtype="bfloat16", **changes)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ONEDNN_MAX_CPU_ISA", request.param)
        torch.multiprocessing.spawn(
            layers_and_engines_of_a_processor, (models, str(folder / "found.pt"))
        )
    return request.param, models, torch.load(folder / "found.pt", weights_only=False)


def test_linear_layers_compute_on_every_processor_with_what_they_hold(processor):
    isa, _, found = processor
    for layer in found["layers"]:
        x, weight, dtype = layer["x"], layer["weight"], layer["x"].dtype
        for y, w, bias in (
            (layer["y"], weight, layer["bias"]),
            (layer["stale_y"], layer["stale_held"], None),
            (layer["next_y"], layer["next"], None),
        ):
            product, bias = x.double() @ w.double().T, torch.zeros(1) if bias is None else bias
            # each result rounded, product and sum; the terms added up in float32
            bound = torch.finfo(dtype).eps * (2 * product.abs() + bias.abs().double())
            bound += (
                len(x[0]) * torch.finfo(torch.float32).eps * (x.abs().double() @ w.abs().double().T)
            )
            assert (
                y.dtype == dtype and ((y.double() - product - bias.double()).abs() <= bound).all()
            )
        assert torch.equal(layer["held"], weight) and torch.equal(layer["next_held"], layer["next"])
        if (dtype, isa) != (torch.float16, "DEFAULT"):  # which has products on some processors only
            assert layer["packed"] == (torch.float32 if isa == "AVX2" else dtype)


def test_bfloat16_engines_compute_on_every_processor_what_was_synced(processor):
    """Beside transformers in float32; its own bfloat16 is the yardstick."""
    _, models, found = processor
    for family, model_dir in models.items():
        engine = found["engines"][family]
        _, weights = factors(model_dir, 0)
        model = reference_model(
            model_dir, {name: weight.bfloat16() for name, weight in weights.items()}
        )
        exact, rounded = reference_logprobs(model), reference_logprobs(model.bfloat16())
        error, usual = np.abs(engine["logprobs"] - exact), np.abs(rounded - exact)
        assert error.mean() < 2 * usual.mean() and error.max() < 4 * usual.max() < 1
        assert all(len(answer.logprobs) for answer in engine["answers"])
        for target, entry in engine["movement"].items():
            assert entry["max_error"] == 0 == entry["lost"] and entry["moved"] > 0.1, target
        lost = {
            target for target, entry in engine["after_a_loss"].items() if entry["max_error"] > 0
        }
        assert lost == {"linear_proj"}


def test_the_sizes_that_kernels_take_are_vllms_own():
    import vllm.model_executor.layers.attention  # noqa: F401  first, as vLLM imports them
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert [*limits.HEAD_DIMS] == CPUAttentionBackend.get_supported_head_sizes()
    assert limits.EXPERT_STEP == CPUUnquantizedExperts.output_alignment
