"""The Megatron model of each family in each kind of layout, against transformers and against one rank."""

import zlib

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mindspeed_qerl.config import ConfigError
from mindspeed_qerl.layout.plan import Layout
from mindspeed_qerl.layout.shapes import read_shape
from mindspeed_qerl.local.batch import build_batch, deal
from mindspeed_qerl.local.engine import data_rank
from mindspeed_qerl.local.model import stage_layers
from mindspeed_qerl.local.settings import check
from mindspeed_qerl.local.weights import COLUMN, GATED, ROW, Checkpoint, mappings, merge_qkv, split_qkv

from .conftest import FAMILIES, make_model, raw_config

MOE = tuple(family for family in FAMILIES if family.endswith("moe"))
ONE = "one rank"
LAYOUTS = {  # name: (ranks, tensor, pipeline, expert parallel size, sequence parallel, layers computed again for their gradient)
    ONE: (1, 1, 1, 1, False, 0),
    "DP 2": (2, 1, 1, 1, False, 1),
    "EP 2": (2, 1, 1, 2, False, 0),
    "TP 2": (2, 2, 1, 1, False, 0),
    "TP 2, sequence parallel": (2, 2, 1, 1, True, 0),
    "PP 2": (2, 1, 2, 1, False, 0),
    "TP 2, EP 2": (4, 2, 1, 2, False, 0),
    "TP 2, PP 2, EP 2": (8, 2, 2, 2, False, 2),
}
CASES = [(layout, family) for layout, (_, tp, _, ep, sequence, _) in LAYOUTS.items() for family in FAMILIES
         if (family in MOE) or (ep == 1)
         if (family not in MOE) or not (tp > 1 and ep == 1 and not sequence)]  # experts with TP make it sequence parallel anyway
RECOMPUTE = {"megatron_training__recompute_granularity": "full", "megatron_training__recompute_method": "block"}
STEPS = 3


def random_batch(count=8, vocab=96):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, rng.integers(3, 9)).tolist() for _ in range(count)]
    answers = [rng.integers(0, vocab, rng.integers(2, 12)).tolist() for _ in range(count)]
    return build_batch(prompts, answers, [(-2 - rng.random(len(a))).tolist() for a in answers], rng.normal(size=count))


def train_rank(rank, configs, folder):
    """What the tests compare: logprobs, three iterations, gradients, merged weights. Runs in a process of its own, family by family."""
    from megatron.core import parallel_state

    from mindspeed_qerl.local.rank import TrainRank
    from mindspeed_qerl.lora import lora_layers

    torch.set_num_threads(1)
    batch = random_batch()
    for family, config in configs.items():
        trainer = TrainRank(config, rank, f"file://{folder}/{family}")
        rows = deal(batch.lengths, config.layout.dp)[data_rank(rank, config.layout)]
        shard = batch.rows(rows)
        result = {"rows": rows if parallel_state.is_pipeline_last_stage() else [], "report": trainer.describe()[0],
                  "logprobs": trainer.logprobs(shard)}
        for name, layer in lora_layers(trainer.model):  # B away from zero, so that A has a gradient as well; the same in each layout
            mapping = trainer.table[name + ".weight"]
            generator = torch.Generator().manual_seed(zlib.crc32("".join(mapping.hf).encode()))
            b = 0.02 * torch.randn(layer.base_layer.output_size, config.lora_r, generator=generator)
            split = layer.tp_size > 1 and not layer.row_parallel
            layer.lora_B.data.copy_(mapping.shared.shard(b, trainer.tp_rank, trainer.tp_size) if split else b)
        result["metrics"] = [trainer.train([shard])]
        whole = {mapping.hf: trainer._whole_factors(mapping, layer, layer.lora_A.grad, layer.lora_B.grad)
                 for mapping, layer in trainer._owned()}
        result["gradients"] = {(*hf, part): gradient.clone() for hf, pair in whole.items() if pair for part, gradient in zip("AB", pair)}
        result["metrics"] += [trainer.train([shard]) for _ in range(STEPS - 1)]
        result["adapters"] = {name: layer.lora_B.detach().norm().item() for name, layer in lora_layers(trainer.model)}
        result["merged"] = {name: weight for part in range(len(trainer.parts)) for name, weight in trainer.merged_weights(part).items()}
        result["factors"] = trainer.adapter_factors()
        result["trained_logprobs"] = trainer.logprobs(shard)
        result["reference_logprobs"] = trainer.logprobs(shard, reference=True)
        torch.save(result, f"{folder}/{family}{rank}.pt")
        torch.distributed.destroy_process_group()
        parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def results(model_dirs, data_dir, tmp_path_factory):
    """{(layout, family): [result of each rank]} of the same work in each layout, made when first asked for."""
    made = {}

    def of(layout, family):
        if (layout, family) not in made:
            ranks, tp, pp, ep, sequence, recompute = LAYOUTS[layout]
            folder = tmp_path_factory.mktemp("ranks")
            families = [f for name, f in CASES if name == layout]
            again = RECOMPUTE | {"megatron_training__recompute_num_layers": recompute} if recompute else {}
            configs = {f: check(raw_config(
                model_dirs[f], data_dir, **again, rl_config__actor_resource__num_npus=ranks, rl_config__init_kl_coef=0.1,
                megatron_training__sequence_parallel=sequence, actor_config__tensor_model_parallel_size=tp,
                actor_config__pipeline_model_parallel_size=pp, actor_config__expert_model_parallel_size=ep,
                actor_config__micro_batch_size=2, actor_config__lr=1e-3, actor_config__clip_grad=0.05)) for f in families}
            mp.spawn(train_rank, (configs, str(folder)), nprocs=ranks)
            for f in families:
                made[layout, f] = [torch.load(folder / f"{f}{rank}.pt", weights_only=False) for rank in range(ranks)]
        return made[layout, family]
    return of


def transformers_logprobs(directory, batch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.from_numpy(batch.tokens)
        mask = torch.arange(tokens.shape[1]) < torch.from_numpy(batch.lengths).unsqueeze(1)
        logprobs = model(tokens, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()


def assembled(ranks, key, batch):
    """The last stage's rows put back where they came from, zero outside the mask."""
    whole = np.zeros(batch.mask.shape, dtype=np.float32)
    for result in ranks:
        if len(result["rows"]):
            whole[result["rows"], : result[key].shape[1]] = result[key]
    return whole * batch.mask


@pytest.mark.parametrize("layout, family", CASES)
def test_logprobs_are_those_of_transformers(results, model_dirs, layout, family):
    batch = random_batch()
    difference = assembled(results(layout, family), "logprobs", batch) - transformers_logprobs(model_dirs[family], batch) * batch.mask
    assert np.abs(difference).max() < 1e-5


@pytest.mark.parametrize("layout, family", CASES)
def test_merged_weights_give_transformers_the_trained_policy(results, model_dirs, tmp_path, layout, family):
    from safetensors.torch import load_file, save_file

    ranks, model_dir = results(layout, family), model_dirs[family]
    merged = {name: torch.from_numpy(array) for result in ranks for name, array in result["merged"].items()}
    base = load_file(model_dir / "model.safetensors")
    assert {name for name in base if name.endswith("_proj.weight")} == set(merged)  # every attention, MLP and expert weight, each once
    assert sum(len(result["merged"]) for result in ranks) == len(merged)
    save_file({**base, **merged}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    batch = random_batch()
    trained = transformers_logprobs(tmp_path, batch) * batch.mask
    assert np.abs(assembled(ranks, "trained_logprobs", batch) - trained).max() < 1e-5
    assert np.abs(trained - transformers_logprobs(model_dir, batch) * batch.mask).max() > 1e-2  # it did learn something


@pytest.mark.parametrize("layout, family", CASES)
def test_reference_logprobs_are_the_base_models_after_training(results, layout, family):
    for result in results(layout, family):
        np.testing.assert_array_equal(result["reference_logprobs"], result["logprobs"])


@pytest.mark.parametrize("layout, family", [("EP 2", "qwen3_moe"), ("TP 2", "qwen3"), ("TP 2, EP 2", "qwen2_moe")])
def test_merged_weight_is_base_plus_scaled_product(results, model_dirs, layout, family):
    checkpoint, seen = Checkpoint(model_dirs[family]), 0
    for result in results(layout, family):
        for name, (_, b, a) in result["factors"].items():
            expected = checkpoint.read(name).double().numpy() + b.astype(np.float64) @ a.astype(np.float64)
            np.testing.assert_allclose(result["merged"][name], expected, atol=1e-6)
            seen += 1
    assert seen == sum(name.endswith("_proj.weight") for name in checkpoint.files)


@pytest.mark.parametrize("layout, family", [case for case in CASES if case[0] != ONE])
def test_ranks_train_like_one(results, layout, family):
    (one,), ranks = results(ONE, family), results(layout, family)
    gradients = {name: gradient for result in ranks for name, gradient in result["gradients"].items()}
    assert set(gradients) == set(one["gradients"])
    for name, gradient in one["gradients"].items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name  # 0 for an expert that no token chose
    for step in range(STEPS):
        for result in ranks:
            for key in ("loss/policy", "loss/kl", "loss/total", "grad_norm", "mismatch/k3", "mismatch/max_abs_prob_diff"):
                assert result["metrics"][step][key] == pytest.approx(one["metrics"][step][key], rel=1e-4, abs=1e-4), key
    assert one["metrics"][0]["grad_norm"] > 0.05  # so clipping was at work
    assert one["metrics"][-1]["loss/kl"] > 0


@pytest.mark.parametrize("layout, family", CASES)
def test_every_adapter_learned_and_is_counted_once(results, layout, family):
    (one,), ranks = results(ONE, family), results(layout, family)
    mlps = {"qwen3_moe": 16, "qwen2_moe": 18}.get(family, 2)  # each expert, shared ones too, in each of two layers
    for key, counted in (("modules", {"linear_qkv": 2, "linear_proj": 2, "linear_fc1": mlps, "linear_fc2": mlps}),
                         ("parameters", {target: entry["parameters"] for target, entry in one["report"].items()})):
        assert {target: sum(result["report"][target][key] for result in ranks) for target in counted} == counted
    assert all(norm > 0 for result in ranks for norm in result["adapters"].values())


def test_qkv_is_interleaved_by_group_as_megatron_reads_it():
    """SelfAttention.get_query_key_value_tensors views the output as [groups, (heads/groups + 2) * d] (attention.py)."""
    heads, groups, d, hidden = 4, 2, 3, 5
    q, k, v = (torch.arange(n * d * hidden).reshape(n * d, hidden) + 1000 * i for i, n in enumerate((heads, groups, groups)))
    expected = torch.cat([torch.cat([q[2 * g * d:2 * (g + 1) * d], k[g * d:(g + 1) * d], v[g * d:(g + 1) * d]]) for g in range(groups)])
    merged = merge_qkv([q, k, v], groups)
    assert torch.equal(merged, expected)
    for part, back in zip((q, k, v), split_qkv(merged, groups, d)):
        assert torch.equal(part, back)


def test_tensor_parallel_parts_are_those_megatron_reads():
    """A gated fc1 holds on each rank its part of gate, then its part of up (mlp.py: torch.chunk(x, 2, dim=-1))."""
    weight = torch.arange(24).reshape(8, 3)
    gate, up = weight[:4], weight[4:]
    assert torch.equal(GATED.shard(weight, 1, 2), torch.cat([gate[2:], up[2:]]))
    assert torch.equal(COLUMN.shard(weight, 1, 4), weight[2:4])
    assert torch.equal(ROW.shard(weight.T, 0, 2), weight[:4].T)
    for shared, whole, size in ((GATED, weight, 4), (COLUMN, weight, 2), (ROW, weight.T, 4)):
        assert torch.equal(shared.join([shared.shard(whole, rank, size) for rank in range(size)]), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_of_all_ranks_name_every_tensor_once(model_dirs, family):
    shape = read_shape(model_dirs[family])
    stages = stage_layers(shape, Layout(world=2, pp=2))
    assert stages == [range(1), range(1, 2)]
    parts = [range(4), range(4, 8)] if shape.moe else [range(0)]
    tables = [mappings(shape, layers, experts, stage == 0, stage == 1) for stage, layers in enumerate(stages) for experts in parts]
    names = {name for table in tables for mapping in table for name in mapping.hf}
    assert names == set(Checkpoint(model_dirs[family]).files)
    once = [name for mapping in mappings(shape, range(2), range(shape.num_experts)) for name in mapping.hf]
    assert sorted(once) == sorted(names)


def test_missing_weights_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model.safetensors"):
        Checkpoint(tmp_path)
    make_model("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="no tensor 'model.lm_head.weight'"):
        Checkpoint(tmp_path).read("model.lm_head.weight")
