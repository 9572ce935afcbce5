"""The Megatron model on one rank and on two, expert-parallel and data-parallel, against transformers and against each other."""

import zlib

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from mindspeed_qerl.config import ConfigError
from mindspeed_qerl.local.batch import build_batch, deal
from mindspeed_qerl.local.settings import check
from mindspeed_qerl.local.weights import Checkpoint, merge_qkv, qwen3_moe_mappings, split_qkv

from .conftest import make_qwen3_moe, raw_config

ONE, EXPERT_PARALLEL, DATA_PARALLEL = (1, 1), (2, 2), (2, 1)  # (ranks, expert parallel size)
LAYOUTS = (ONE, EXPERT_PARALLEL, DATA_PARALLEL)


def random_batch(count=8, vocab=96):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab, rng.integers(3, 9)).tolist() for _ in range(count)]
    answers = [rng.integers(0, vocab, rng.integers(2, 12)).tolist() for _ in range(count)]
    return build_batch(prompts, answers, [(-2 - rng.random(len(a))).tolist() for a in answers], rng.normal(size=count))


def train_rank(rank, config, folder):
    """What the tests compare: logprobs, three iterations, gradients, merged weights. Runs in its own process."""
    from mindspeed_qerl.local.rank import TrainRank
    from mindspeed_qerl.lora import lora_layers

    torch.set_num_threads(1)
    trainer = TrainRank(config, rank, config.ranks, f"file://{folder}/store")
    batch = random_batch()
    rows = deal(batch.lengths, config.ranks)[rank]
    shard = batch.rows(rows)
    result = {"rows": rows, "logprobs": trainer.logprobs(shard), "report": trainer.describe()}
    for name, layer in lora_layers(trainer.model):  # B away from zero, so that A has a gradient as well
        torch.nn.init.normal_(layer.lora_B, std=0.02, generator=torch.Generator().manual_seed(zlib.crc32(layer.lora_A.detach().numpy())))
    result["metrics"] = [trainer.train([shard])]
    result["gradients"] = {(*mapping.hf, part): getattr(layer, part).grad.clone()
                           for mapping, layer in trainer._owned_layers() for part in ("lora_A", "lora_B")}
    result["metrics"] += [trainer.train([shard]) for _ in range(2)]
    result["adapters"] = {name: layer.lora_B.detach().norm().item() for name, layer in lora_layers(trainer.model)}
    result["merged"] = trainer.merged_weights()
    result["factors"] = trainer.adapter_factors()
    result["trained_logprobs"] = trainer.logprobs(shard)
    result["reference_logprobs"] = trainer.logprobs(shard, reference=True)
    torch.save(result, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def results(moe_dir, data_dir, tmp_path_factory):
    """{layout: [result of each rank]} of the same work in each layout."""
    gathered = {}
    for ranks, expert_parallel in LAYOUTS:
        folder = tmp_path_factory.mktemp("ranks")
        config = check(raw_config(moe_dir, data_dir, rl_config__actor_resource__num_npus=ranks, rl_config__init_kl_coef=0.1,
                                  actor_config__expert_model_parallel_size=expert_parallel, actor_config__micro_batch_size=3,
                                  actor_config__lr=1e-2, actor_config__clip_grad=0.05))
        mp.spawn(train_rank, (config, str(folder)), nprocs=ranks)
        gathered[ranks, expert_parallel] = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
    return gathered


def transformers_logprobs(directory, batch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        tokens = torch.from_numpy(batch.tokens)
        mask = torch.arange(tokens.shape[1]) < torch.from_numpy(batch.lengths).unsqueeze(1)
        logprobs = model(tokens, attention_mask=mask.long()).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1).numpy()


def assembled(ranks, key, batch):
    """A rank's rows put back where they came from, zero outside the mask."""
    whole = np.zeros(batch.mask.shape, dtype=np.float32)
    for result in ranks:
        whole[result["rows"], : result[key].shape[1]] = result[key]
    return whole * batch.mask


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_are_those_of_transformers(results, moe_dir, layout):
    batch = random_batch()
    difference = assembled(results[layout], "logprobs", batch) - transformers_logprobs(moe_dir, batch) * batch.mask
    assert np.abs(difference).max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_weights_give_transformers_the_trained_policy(results, moe_dir, tmp_path, layout):
    from safetensors.torch import load_file, save_file

    merged = {name: torch.from_numpy(array) for result in results[layout] for name, array in result["merged"].items()}
    base = load_file(moe_dir / "model.safetensors")
    assert {name for name in base if "_proj" in name} == set(merged)  # every attention and expert weight, each once
    assert sum(len(result["merged"]) for result in results[layout]) == len(merged)
    save_file({**base, **merged}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((moe_dir / "config.json").read_text())
    batch = random_batch()
    trained = transformers_logprobs(tmp_path, batch) * batch.mask
    assert np.abs(assembled(results[layout], "trained_logprobs", batch) - trained).max() < 1e-5
    assert np.abs(trained - transformers_logprobs(moe_dir, batch) * batch.mask).max() > 1e-2  # it did learn something


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_logprobs_are_the_base_models_after_training(results, layout):
    for result in results[layout]:
        np.testing.assert_array_equal(result["reference_logprobs"], result["logprobs"])


def test_merged_weight_is_base_plus_scaled_product(results, moe_dir):
    checkpoint = Checkpoint(moe_dir)
    for result in results[EXPERT_PARALLEL]:
        for name, (_, b, a) in result["factors"].items():
            expected = checkpoint.read(name).double().numpy() + b.astype(np.float64) @ a.astype(np.float64)
            np.testing.assert_allclose(result["merged"][name], expected, atol=1e-6)


@pytest.mark.parametrize("layout", [EXPERT_PARALLEL, DATA_PARALLEL])
def test_two_ranks_train_like_one(results, layout):
    (one,) = results[ONE]
    gradients = {name: g for result in results[layout] for name, g in result["gradients"].items()}
    assert set(gradients) == set(one["gradients"])
    for name, gradient in one["gradients"].items():
        assert (gradients[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    for step in range(3):
        for result in results[layout]:
            for key in ("loss/policy", "loss/kl", "loss/total", "grad_norm", "mismatch/k3", "mismatch/max_abs_prob_diff"):
                assert result["metrics"][step][key] == pytest.approx(one["metrics"][step][key], rel=1e-3, abs=1e-6), key
    assert one["metrics"][0]["grad_norm"] > 0.05  # so clipping was at work
    assert one["metrics"][2]["loss/kl"] > 0


def test_every_adapter_learned_and_is_counted_once(results):
    for layout in LAYOUTS:
        totals = {target: sum(result["report"][target]["modules"] for result in results[layout]) for target in results[ONE][0]["report"]}
        assert totals == {"linear_qkv": 2, "linear_proj": 2, "linear_fc1": 16, "linear_fc2": 16}
        assert all(norm > 0 for result in results[layout] for norm in result["adapters"].values())


def test_qkv_is_interleaved_by_group_as_megatron_reads_it():
    """SelfAttention.get_query_key_value_tensors views the output as [groups, (heads/groups + 2) * d] (attention.py)."""
    heads, groups, d, hidden = 4, 2, 3, 5
    q, k, v = (torch.arange(n * d * hidden).reshape(n * d, hidden) + 1000 * i for i, n in enumerate((heads, groups, groups)))
    expected = torch.cat([torch.cat([q[2 * g * d:2 * (g + 1) * d], k[g * d:(g + 1) * d], v[g * d:(g + 1) * d]]) for g in range(groups)])
    merged = merge_qkv([q, k, v], groups)
    assert torch.equal(merged, expected)
    for part, back in zip((q, k, v), split_qkv(merged, groups, d)):
        assert torch.equal(part, back)


def test_the_table_names_every_tensor_of_the_checkpoint_once(moe_dir):
    from transformers import AutoConfig

    table = qwen3_moe_mappings(AutoConfig.from_pretrained(moe_dir), range(8))
    names = [name for mapping in table for name in mapping.hf]
    assert sorted(names) == sorted(Checkpoint(moe_dir).files)


def test_missing_weights_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no model.safetensors"):
        Checkpoint(tmp_path)
    make_qwen3_moe(tmp_path)
    with pytest.raises(ConfigError, match="no tensor 'model.lm_head.weight'"):
        Checkpoint(tmp_path).read("model.lm_head.weight")
