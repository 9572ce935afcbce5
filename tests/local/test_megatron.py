"""The Megatron model of each family in each kind of layout, against transformers and against one
rank.
"""

import json
import shutil
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.checkpoint import Checkpoint
from mindspeed_qerl.families.tensors import mappings
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.model import check_tensors, load_weights
from mindspeed_qerl.lora.export import save_merged, save_peft
from mindspeed_qerl.lora.rounding import dither_of, rounded

from .conftest import (
    FAMILIES,
    NARROW,
    batch_of,
    furthest,
    logprobs_of,
    make_model,
    recipe_of,
    run_ranks,
)
from .test_rollout import reference_model

MOE = tuple(family for family in FAMILIES if family.endswith("moe"))
ONE = "one rank"
# name: (ranks, TP, PP, EP, sequence parallel, layers computed again for their gradient)
LAYOUTS = {
    ONE: (1, 1, 1, 1, False, 0),
    "DP 2": (2, 1, 1, 1, False, 1),
    "EP 2": (2, 1, 1, 2, False, 0),
    "TP 2": (2, 2, 1, 1, False, 0),
    "TP 2, sequence parallel": (2, 2, 1, 1, True, 0),
    "PP 2": (2, 1, 2, 1, False, 0),
    "DP 4, EP 2": (4, 1, 1, 2, False, 0),  # each expert on two ranks
    "TP 2, EP 2": (4, 2, 1, 2, False, 0),
    "TP 2, PP 2, EP 2": (8, 2, 2, 2, False, 2),
    "TP 2, DP 2": (4, 2, 1, 1, False, 0),
    "TP 2, PP 2, DP 2": (8, 2, 2, 1, False, 2),
}
CASES = [
    (layout, family)
    for layout, (_, tp, _, ep, sequence, _) in LAYOUTS.items()
    for family in FAMILIES
    if (family in MOE) or (ep == 1)
    if (family not in MOE) or not (tp > 1 and ep == 1 and not sequence)
]  # experts with TP make it so anyway
CASES += [(ONE, name) for name in NARROW]
# in `make test`: every family on one rank, and layouts and families that have what the others have
DEFAULT = {
    *((ONE, family) for family in FAMILIES),
    ("EP 2", "qwen3_moe"),
    ("EP 2", "qwen2_moe"),
    ("TP 2, sequence parallel", "qwen3"),
    ("TP 2, sequence parallel", "qwen2_moe"),
    ("PP 2", "qwen2"),
    ("DP 4, EP 2", "qwen3_moe"),
    ("TP 2, PP 2, EP 2", "qwen2_moe"),
    (ONE, "Qwen2.5-72B"),
    (ONE, "Qwen3-4B"),
    (ONE, "Llama-3.2-1B"),
}
PARAMETERS = [
    pytest.param(*case, marks=[] if case in DEFAULT else [pytest.mark.full]) for case in CASES
]
RECOMPUTE = {
    "megatron_training__recompute_granularity": "full",
    "megatron_training__recompute_method": "block",
}
STEPS, SAVED = 5, 3  # iterations, and the one after which a checkpoint is made


def random_batch(count=8, vocab=96):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, rng.integers(3, 9)).tolist() for _ in range(count)]
    answers = [rng.integers(0, vocab, rng.integers(2, 12)).tolist() for _ in range(count)]
    logprobs = [(-2 - rng.random(len(a))).tolist() for a in answers]
    return batch_of(prompts, answers, logprobs, rng.normal(size=count))


def share_of(trainer, batch):
    """A rank's rows: their places in the batch, and the batch of them."""
    [rows] = trainer.rows(batch)
    return rows, batch.rows(rows)


def exported(trainer):
    """HF name -> tensor: what the rank's parameters are as Hugging Face's tensors, the whole ones
    on the first rank of a tensor parallel group.
    """
    parameters = {
        name.replace(".base_layer.", "."): parameter
        for name, parameter in trainer.model.named_parameters()
    }
    whole = {
        name: trainer.place.whole(parameters[name].detach(), mapping.shared)
        for name, mapping in trainer.adapters.table.items()
    }
    return {
        hf: part.clone()
        for name, value in whole.items()
        if value is not None
        for hf, part in zip(
            trainer.adapters.table[name].hf, trainer.adapters.table[name].split(value)
        )
    }


def move_b(trainer):
    """B away from zero, so that A has a gradient as well; the same in each layout."""
    for mapping, layer in trainer.adapters.layers:
        generator = torch.Generator().manual_seed(zlib.crc32("".join(mapping.hf).encode()))
        shape = (layer.base_layer.output_size, len(layer.lora_A))
        b = 0.02 * torch.randn(shape, generator=generator)
        if layer.tp_size > 1 and not layer.row_parallel:
            b = mapping.shared.shard(b, trainer.place.tp_rank, trainer.place.tp_size)
        layer.lora_B.data.copy_(b)


def whole_gradients(trainer):
    """(mapping, gradients of A and B) of the layers that this rank hands over."""
    for mapping, layer in trainer.adapters.owned:
        a = trainer.adapters.whole(mapping, layer, layer.lora_A, layer.lora_A.grad)
        b = trainer.adapters.whole(mapping, layer, layer.lora_B, layer.lora_B.grad)
        if a is not None:
            yield mapping, (a, b)


def train_rank(start, configs, folder):
    """What the tests compare: weights, logprobs, five iterations, gradients. Runs in a process of
    its own, family by family.
    """
    from megatron.core import parallel_state

    from mindspeed_qerl.lora.adapters import lora_layers

    batch = random_batch()
    results = {}
    for family, config in configs.items():
        trainer = start(config)
        rows, shard = share_of(trainer, batch)
        result = {
            "rows": rows if parallel_state.is_pipeline_last_stage() else [],
            "report": trainer.describe(),
            "logprobs": trainer.logprobs(shard),
            "exported": exported(trainer),
        }
        move_b(trainer)
        result["metrics"] = [trainer.train(batch)]
        result["gradients"] = {}
        for mapping, pair in whole_gradients(trainer):
            for part, gradient in zip("AB", pair):
                result["gradients"][(*mapping.hf, part)] = gradient.clone()
        result["metrics"] += [trainer.train(batch) for _ in range(SAVED - 1)]
        result["saved"] = folder / family
        result["saved"].mkdir(exist_ok=True)
        trainer.save(result["saved"])
        result["saved_logprobs"] = trainer.logprobs(shard)
        result["metrics"] += [trainer.train(batch) for _ in range(STEPS - SAVED)]
        result["adapters"] = {
            name: layer.lora_B.detach().norm().item() for name, layer in lora_layers(trainer.model)
        }
        result["merged"] = {
            name: weight
            for number in range(2)
            for name, weight in trainer.merged_weights(number).items()
        }
        result["factors"] = trainer.adapter_factors()
        result["trained_logprobs"] = trainer.logprobs(shard)
        result["reference_logprobs"] = trainer.logprobs(shard, reference=True)
        results[family] = result
        torch.distributed.destroy_process_group()
        parallel_state.destroy_model_parallel()
    return results


def resume_rank(start, config, saved):
    """The iterations after a checkpoint, by ranks that know of nothing else."""
    trainer = start(config)
    trainer.restore(saved, SAVED, SAVED)
    return {
        "metrics": [trainer.train(random_batch()) for _ in range(STEPS - SAVED)],
        "factors": trainer.adapter_factors(),
    }


def layout_config(layout, model_dir, data_dir, **changed):
    """layout: of LAYOUTS, or such numbers; changed: as in `recipe_of`."""
    ranks, tp, pp, ep, sequence, recompute = LAYOUTS.get(layout, layout)
    options = dict(
        rl_config__actor_resource__num_npus=ranks,
        rl_config__init_kl_coef=0.1,
        megatron_training__sequence_parallel=sequence,
        actor_config__tensor_model_parallel_size=tp,
        actor_config__pipeline_model_parallel_size=pp,
        actor_config__expert_model_parallel_size=ep,
        actor_config__micro_batch_size=2,
        actor_config__lr=1e-3,
        actor_config__clip_grad=0.05,
    )
    if recompute:
        options |= RECOMPUTE | {"megatron_training__recompute_num_layers": recompute}
    return recipe_of(model_dir, data_dir, **options | changed)


@pytest.fixture(scope="module")
def results(model_dirs, data_dir, tmp_path_factory):
    """{(layout, family): [result of each rank]} of the same work in each layout, made when first
    asked for.
    """
    made = {}

    def of(layout, family):
        if (layout, family) not in made:
            ranks, folder = LAYOUTS[layout][0], tmp_path_factory.mktemp("ranks")
            is_default = (layout, family) in DEFAULT
            families = [
                f for name, f in CASES if name == layout and ((name, f) in DEFAULT) == is_default
            ]
            configs = {f: layout_config(layout, model_dirs[f], data_dir) for f in families}
            found = run_ranks(train_rank, ranks, configs, folder)
            for f in families:
                made[layout, f] = [of_rank[f] for of_rank in found]
        return made[layout, family]

    return of


def transformers_logprobs(model, batch):
    """By a model or the one in a directory."""
    from transformers import AutoModelForCausalLM

    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.from_numpy(batch.tokens)
        mask = torch.arange(tokens.shape[1]) < torch.from_numpy(batch.lengths).unsqueeze(1)
        return logprobs_of(model, tokens, attention_mask=mask.long()).numpy()


def assembled(ranks, key, batch):
    """The last stage's rows put back where they came from, zero outside the mask."""
    whole = np.zeros(batch.mask.shape, dtype=np.float32)
    for result in ranks:
        if len(result["rows"]):
            whole[result["rows"], : result[key].shape[1]] = result[key]
    return whole * batch.mask


@pytest.mark.parametrize("layout, family", PARAMETERS)
def test_logprobs_are_those_of_transformers(results, model_dirs, layout, family):
    batch = random_batch()
    difference = (
        assembled(results(layout, family), "logprobs", batch)
        - transformers_logprobs(model_dirs[family], batch) * batch.mask
    )
    assert np.abs(difference).max() < 1e-5


@pytest.mark.parametrize("layout, family", PARAMETERS)
def test_from_hugging_face_to_megatron_and_back_is_bit_identical(
    results, model_dirs, layout, family
):
    from safetensors.torch import load_file

    base, seen = load_file(model_dirs[family] / "model.safetensors"), set()
    for result in results(layout, family):
        for name, tensor in result["exported"].items():
            assert torch.equal(tensor, base[name]), name
            seen.add(name)
    assert seen == set(base)


@pytest.mark.parametrize("layout, family", PARAMETERS)
def test_merged_weights_give_transformers_the_trained_policy(
    results, model_dirs, tmp_path, layout, family
):
    from safetensors.torch import load_file, save_file

    ranks, model_dir = results(layout, family), model_dirs[family]
    merged = {
        name: torch.from_numpy(array)
        for result in ranks
        for name, array in result["merged"].items()
    }
    base = load_file(model_dir / "model.safetensors")
    # every attention, MLP and expert weight, each once
    assert {name for name in base if name.endswith("_proj.weight")} == set(merged)
    assert sum(len(result["merged"]) for result in ranks) == len(merged)
    save_file({**base, **merged}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    batch = random_batch()
    trained = transformers_logprobs(tmp_path, batch) * batch.mask
    assert furthest(assembled(ranks, "trained_logprobs", batch), trained) < 1e-5
    # it did learn something
    assert furthest(trained, transformers_logprobs(model_dir, batch) * batch.mask) > 1e-2


@pytest.mark.parametrize("layout, family", PARAMETERS)
def test_reference_logprobs_are_the_base_models_after_training(results, layout, family):
    for result in results(layout, family):
        np.testing.assert_array_equal(result["reference_logprobs"], result["logprobs"])


@pytest.mark.parametrize("layout, family", [case for case in PARAMETERS if case.values[0] != ONE])
def test_ranks_train_like_one(results, layout, family):
    (one,), ranks = results(ONE, family), results(layout, family)
    gradients = {
        name: gradient for result in ranks for name, gradient in result["gradients"].items()
    }
    assert set(gradients) == set(one["gradients"])
    for name, gradient in one["gradients"].items():
        # 0 for an expert that no token chose
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for step in range(STEPS):
        for result in ranks:
            assert result["metrics"][step]["selection/trained_tokens"] == random_batch().mask.sum()
            for key in (
                "loss/policy",
                "loss/kl",
                "loss/total",
                "grad_norm",
                "mismatch/k3",
                "mismatch/max_abs_prob_diff",
            ):
                assert result["metrics"][step][key] == pytest.approx(
                    one["metrics"][step][key], rel=1e-4, abs=1e-4
                ), key
    assert one["metrics"][0]["grad_norm"] > 0.05  # so clipping was at work
    assert one["metrics"][-1]["loss/kl"] > 0


@pytest.mark.parametrize(
    "before, after, family",
    [
        ("EP 2", "EP 2", "qwen3_moe"),
        pytest.param(ONE, "TP 2, EP 2", "qwen2_moe", marks=pytest.mark.full),
        ("TP 2, PP 2, EP 2", ONE, "qwen2_moe"),
        ("PP 2", "TP 2, sequence parallel", "qwen2"),
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(
    results, model_dirs, data_dir, tmp_path, before, after, family
):
    unbroken, ranks = results(before, family), LAYOUTS[after][0]
    config = layout_config(after, model_dirs[family], data_dir)
    resumed = run_ranks(resume_rank, ranks, config, str(unbroken[0]["saved"]))
    keys = ("loss/policy", "loss/kl", "loss/total", "grad_norm", "lr", "mismatch/k3")
    exactly = 0 if before == after else 1e-4
    for one, other in zip(unbroken[0]["metrics"][SAVED:], resumed[0]["metrics"], strict=True):
        assert [other[key] for key in keys] == pytest.approx(
            [one[key] for key in keys], rel=exactly, abs=exactly
        )
    factors, expected = (
        {name: (b, a) for result in of for name, (_, b, a) in result["factors"].items()}
        for of in (resumed, unbroken)
    )
    assert factors.keys() == expected.keys()
    for name, pair in factors.items():
        for found, wanted in zip(pair, expected[name]):
            np.testing.assert_allclose(found, wanted, rtol=exactly, atol=exactly)


@pytest.mark.parametrize(
    "layout, family",
    [
        ("TP 2, PP 2, EP 2", "qwen2_moe"),
        ("TP 2, sequence parallel", "qwen3"),
        ("PP 2", "qwen2"),
        *(pytest.param(ONE, name, marks=pytest.mark.full) for name in NARROW),
    ],
)
def test_exports_of_a_checkpoint_are_the_trained_policy(
    results, model_dirs, data_dir, tmp_path, layout, family
):
    """PEFT on transformers, the merged model in transformers, and Megatron's ranks give the same
    logprobs.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ranks, base, batch = results(layout, family), model_dirs[family], random_batch()
    config = layout_config(layout, base, data_dir)
    describe = checkpoint.describe(read_shape(base), config.lora)
    checkpoint.save(
        tmp_path / "checkpoints",
        SAVED,
        describe,
        lambda making: shutil.copytree(ranks[0]["saved"], making, dirs_exist_ok=True),
        1,
    )
    adapters = checkpoint.load_adapters(tmp_path / "checkpoints", base)
    save_peft(adapters, base, tmp_path / "adapter")
    save_merged(adapters, base, tmp_path / "merged")
    merged = transformers_logprobs(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32), batch
    )
    with_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    )
    megatron = assembled(ranks, "saved_logprobs", batch)
    assert furthest(merged * batch.mask, megatron) < 1e-5
    assert furthest(transformers_logprobs(with_peft, batch), merged) < 1e-5
    # they are not the base model
    assert np.abs((merged - transformers_logprobs(base, batch)) * batch.mask).max() > 1e-2


def bfloat16_rank(start, config):
    """What a rank sends and computes after two updates in the shipped regime."""
    trainer = start(config)
    rows, shard = share_of(trainer, random_batch())
    move_b(trainer)
    trainer.train(random_batch())
    trainer.train(random_batch())
    weights, factors = {}, trainer.adapter_factors()
    for number in range(2):
        weights |= trainer.merged_weights(number)
    logprobs = trainer.logprobs(shard)
    return {"rows": rows, "weights": weights, "factors": factors, "logprobs": logprobs}


@pytest.mark.parametrize(
    "layout, family",
    [
        ("TP 2, sequence parallel", "qwen3"),
        ("EP 2", "qwen2_moe"),
        pytest.param("TP 2, EP 2", "qwen3_moe", marks=pytest.mark.full),
    ],
)
def test_in_bfloat16_ranks_multiply_with_what_they_send(data_dir, tmp_path, layout, family):
    """Weights rounded by the bits of Hugging Face's names, in any layout; log-probs of transformers
    with these weights, as near as its own bfloat16.
    """
    changes = {"num_experts_per_tok": 8} if family in MOE else {}  # no rounding changes a route
    model_dir = make_model(family, tmp_path / "model", dtype="bfloat16", **changes)
    config = layout_config(layout, model_dir, data_dir)
    config = replace(
        config,
        model=replace(config.model, dtype="bfloat16"),
        optimizer=replace(config.optimizer, lr=5e-6),
        lora=replace(config.lora, r=32, alpha=64.0),
    )
    results = run_ranks(bfloat16_rank, LAYOUTS[layout][0], config)
    base, weights, differing, total = Checkpoint(model_dir), {}, 0, 0
    for result in results:
        for name, (_, b, a) in result["factors"].items():
            weight, update = base.read(name), torch.from_numpy(b) @ torch.from_numpy(a)
            dither = dither_of(name, weight.shape)
            weights[name] = rounded(weight.float() + update, torch.bfloat16, dither)
            sent = next(each["weights"][name] for each in results if name in each["weights"])
            differing += int((torch.from_numpy(sent) != weights[name].float()).sum())
            total += weight.numel()
    assert differing <= 1e-5 * total  # float32 sums in another order
    batch, model = random_batch(), reference_model(model_dir, weights)
    exact = transformers_logprobs(model, batch)
    usual = np.abs(transformers_logprobs(model.bfloat16(), batch) - exact)
    error = np.abs(assembled(results, "logprobs", batch) - exact * batch.mask)
    assert error.sum() < 2 * (usual * batch.mask).sum()
    base = transformers_logprobs(reference_model(model_dir), batch)
    assert np.abs(base - exact).mean() > 3 * usual.mean()


@pytest.mark.parametrize("layout, family", PARAMETERS)
def test_every_adapter_learned_and_is_counted_once(results, layout, family):
    (one,), ranks = results(ONE, family), results(layout, family)
    mlps = {"qwen3_moe": 16, "qwen2_moe": 18}.get(
        family, 2
    )  # each expert, shared ones too, in each of two layers
    for key, counted in (
        ("modules", {"linear_qkv": 2, "linear_proj": 2, "linear_fc1": mlps, "linear_fc2": mlps}),
        ("parameters", {target: entry["parameters"] for target, entry in one["report"].items()}),
    ):
        total = Counter()
        for result in ranks:
            total.update({target: count[key] for target, count in result["report"].items()})
        assert total == counted
    assert all(norm > 0 for result in ranks for norm in result["adapters"].values())


def load_rank(start, config):
    trainer = start(config)
    return len(trainer.model.decoder.layers), trainer.logprobs(random_batch())


def test_uneven_pipeline_stages(data_dir, tmp_path):
    model_dir = make_model("qwen3_moe", tmp_path / "model", num_hidden_layers=3)
    config = recipe_of(
        model_dir,
        data_dir,
        rl_config__actor_resource__num_npus=2,
        actor_config__pipeline_model_parallel_size=2,
        actor_config__expert_model_parallel_size=1,
        megatron_training__num_layer_list="1,2",
    )
    (first, _), (second, logprobs) = run_ranks(load_rank, 2, config)
    batch = random_batch()
    assert (first, second) == (1, 2)
    assert np.abs((logprobs - transformers_logprobs(model_dir, batch)) * batch.mask).max() < 1e-5


def change_tensors(directory, change):
    from safetensors.torch import load_file, save_file

    save_file(
        change(load_file(directory / "model.safetensors")),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def change_config(directory, **values):
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **values}
    if "num_hidden_layers" in values:
        config.pop("layer_types", None)  # one of each layer, which transformers checks
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "family, tensors, config, message",
    [
        (
            "qwen3_moe",
            lambda w: {k: v for k, v in w.items() if "experts.3.up_proj" not in k},
            {},
            r"no tensor 'model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight', which .* \(2 are",
        ),
        (
            "qwen3",
            None,
            {"num_hidden_layers": 1},
            r"does not call for the tensor 'model\.layers\.1\.input_layernorm\.weight'",
        ),
        (
            "qwen3",
            None,
            {"num_hidden_layers": 3},
            r"no tensor 'model\.layers\.2\.input_layernorm\.weight'",
        ),
        (
            "qwen2",
            lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1},
            {},
            r"tie_word_embeddings = true, but lm_head\.weight differs from",
        ),
        (
            "qwen3",
            lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"},
            {},
            r"no tensor 'lm_head\.weight'.*set tie_word_embeddings",
        ),
    ],
)
def test_a_model_that_is_not_what_its_config_says_is_refused_by_tensor(
    tmp_path, family, tensors, config, message
):
    directory = make_model(family, tmp_path / "model")
    if tensors:
        change_tensors(directory, tensors)
    change_config(directory, **config)
    shape = read_shape(directory)
    with pytest.raises(ConfigError, match=message):
        check_tensors(Checkpoint(directory), shape)


def test_quantized_weights_are_refused_by_tensor(tmp_path):
    directory = make_model("qwen3", tmp_path / "model")
    change_tensors(
        directory,
        lambda w: {k: v.to(torch.float8_e4m3fn) if "q_proj" in k else v for k, v in w.items()},
    )
    linear = torch.nn.Module()
    linear.weight = torch.nn.Parameter(torch.zeros(256, 64))
    [qkv] = (
        row for row in mappings(read_shape(directory), range(1), range(0)) if "qkv" in str(row)
    )
    message = r"self_attn\.q_proj\.weight is torch.float8_e4m3fn; give the model in bfloat16"
    with pytest.raises(ConfigError, match=message):
        load_weights(linear, [replace(qkv, megatron="weight")], Checkpoint(directory), 0, 1)


def test_a_rank_refuses_such_a_model(data_dir, tmp_path):
    directory = make_model("qwen3", tmp_path / "model")
    change_config(directory, intermediate_size=96)
    recipe = recipe_of(
        directory,
        data_dir,
        rl_config__actor_resource__num_npus=1,
        actor_config__expert_model_parallel_size=1,
    )
    message = (
        r"gate_proj\.weight \+ .*up_proj\.weight in .* gives shape \(128, 64\), the model's "
        r"config\.json calls for \(192, 64\)"
    )
    with pytest.raises(mp.ProcessRaisedException, match=message):
        run_ranks(load_rank, 1, recipe)
