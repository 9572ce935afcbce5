"""The memory model against independent counts: published totals, shards that must add up to the
model, tensors counted one by one, and the anchors that were worked out elsewhere.
"""

from dataclasses import replace

import pytest

from mindspeed_qerl.families import NAMED_SHAPES, ModelShape
from mindspeed_qerl.layout.memory import MOMENTS, estimate, settings_of, stage_memory
from mindspeed_qerl.layout.parts import (
    GB,
    GRAPH,
    MemorySettings,
    adapter_weights,
    communicators,
    layer_activations,
)
from mindspeed_qerl.layout.plan import plan_of
from mindspeed_qerl.layout.planner import new_plan
from mindspeed_qerl.layout.sizes import model_parameters, rollout_weights, training_weights
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Batch, Layout, Noise
from tests.layout.dealing import DENSE, QWEN3, QWEN15


def plan(shape, world, batch=None, **layout):
    """Of answers that are padded, one in a micro-batch; 64 prompts or nearly so."""
    it = new_plan(shape, Layout(world, **layout), batch)
    prompts = it.batch.global_batch_size
    return it if batch else replace(it, batch=Batch(prompts, prompts))


def test_int8_copies_come_on_top_of_what_vllm_takes():
    it = plan(DENSE, 8, tp=2, infer_tp=2)
    before, after = (estimate(it, MemorySettings(int8_rollouts=on)) for on in (False, True))
    assert after.kv_cache == before.kv_cache
    h, f, kv = 3584, 18944, 512
    copies = (
        28 * (h * (h + 2 * kv) + h * h + 3 * h * f) // 2
    )  # a byte for each weight of q, k, v, o and the MLP
    assert {moment: after.total(moment) - before.total(moment) for moment in after.moments} == {
        "rollout": copies,
        "weight sync": 0,
        "log-probs": 0,
        "update": 0,
    }
    full = MemorySettings(int8_rollouts=True, gpu_memory_utilization=0.95)
    assert (
        "rollout needs" in estimate(it, full).faults[0]
        and estimate(it, replace(full, int8_rollouts=False)).fits
    )


def test_draws_come_on_top_of_what_vllm_takes_and_stay():
    """A weight for each sequence that is served, of each norm of a layer."""
    recipe = read_recipe(compose("grpo_qwen25_7b_gsm8k_8npu", ["aqn=qerl", "aqn.draws=answer"]))
    it = plan_of(recipe)
    settings = settings_of(recipe)
    before, after = (
        estimate(it, replace(settings, drawn_norms=norms)) for norms in (0, settings.drawn_norms)
    )
    table = 2 * 28 * (recipe.rollout.max_num_seqs + 1) * 3584 * 2
    assert after.kv_cache == before.kv_cache
    for moment in after.moments:
        assert after.total(moment) - before.total(moment) == table
    mixture = read_recipe(
        compose("grpo_qwen3_30b_a3b_gsm8k_16npu", ["aqn=qerl", "aqn.draws=group"])
    )
    assert settings_of(mixture).drawn_norms == 1
    assert settings_of(replace(mixture, noise=Noise())).drawn_norms == 0


def copied(shape):
    """Numbers that every TP rank has whole: norms, routers and the shared expert's gate."""
    h = shape.hidden_size
    layer = 2 * h + shape.num_experts * h
    if shape.model_type.startswith("qwen3"):
        layer += 2 * shape.head_dim
    if shape.shared_expert_intermediate_size:
        layer += h
    return h + shape.num_hidden_layers * layer


@pytest.mark.parametrize(
    "shape, layout",
    [
        (QWEN3, dict(tp=4, pp=3, ep=1, infer_tp=4)),
        (QWEN3, dict(ep=4, infer_ep=4)),
        (QWEN3, dict(tp=2, pp=2, ep=1, infer_ep=4)),
        (QWEN15, dict(tp=4, ep=3, infer_tp=4, infer_ep=3)),
        (DENSE, dict(tp=2, pp=2, infer_tp=4)),
        (NAMED_SHAPES["qwen25_1_5b"], dict(tp=2)),
    ],
)
def test_the_shards_of_all_ranks_add_up_to_the_model(shape, layout):
    """One copy of the model: the TP x EP x PP ranks of training; the TP x EP ranks of vLLM. What
    each TP rank has whole is counted once.
    """
    it = plan(shape, 12, **layout)
    tp, pp, ep = it.layout.tp, it.layout.pp, it.layout.ep
    whole = copied(shape)
    tied = shape.vocab_size * shape.hidden_size if shape.tie_word_embeddings and pp > 1 else 0
    dense, experts = map(sum, zip(*(training_weights(it, stage) for stage in range(pp))))
    assert dense * tp + experts * tp * ep == model_parameters(shape) + (tp - 1) * whole + tied

    (dense, experts), infer_tp = rollout_weights(it), it.layout.infer_tp
    assert (
        dense * infer_tp + experts * infer_tp * it.layout.infer_ep
        == model_parameters(shape) + (infer_tp - 1) * whole
    )


def test_adapters_are_those_that_upstream_counted():
    """docs/ascend.md, the log of a real model on the engine: parameters over all ranks of TP 1."""
    on = {
        "linear_qkv": 11_010_048,
        "linear_proj": 9_437_184,
        "linear_fc1": 704_643_072,
        "linear_fc2": 553_648_128,
    }
    it = plan(QWEN3, 16, ep=16, infer_ep=16)
    for target, expected in on.items():
        dense, experts = adapter_weights(it, MemorySettings(lora_targets=(target,)), 0)
        assert dense + experts * 16 == expected


def test_adapters_under_tensor_parallelism():
    """One dense layer by hand, TP 2: a column-parallel linear divides B only, a row-parallel one A
    only (PEFT tp_layer.py).
    """
    tiny = ModelShape("tiny", "qwen2", 1, 8, 4, 4, 2, 12, 64, 1e6, False, 64)
    mine = adapter_weights(plan(tiny, 2, tp=2, infer_tp=2), MemorySettings(lora_r=3), 0)
    qkv, proj, fc1, fc2 = (
        3 * 8 + 3 * 24 // 2,
        3 * 8 // 2 + 3 * 8,
        3 * 8 + 3 * 24 // 2,
        3 * 12 // 2 + 3 * 8,
    )
    assert sum(mine) == qkv + proj + fc1 + fc2


def parts(memory, moment):
    return {part.name: part.bytes / GB for part in memory.moments[moment]}


def of_update(it, **settings):
    return parts(estimate(it, MemorySettings(**settings)), "update")


def of_sync(it):
    return parts(estimate(it, MemorySettings()), "weight sync")


def test_what_users_report():
    """Boxes like this, EP 4, 2k tokens: base about 15 GB, LoRA 2 GB, activations and gradients
    20-25 GB a rank (without recomputation).
    """
    it = plan(QWEN3, 16, Batch(seq_length=2048), ep=4, infer_ep=4)
    found = of_update(it, recompute_layers=0)
    assert 14 < found["frozen base, experts"] < 18
    assert (
        20
        <= sum(found[name] for name in ("activations kept", "gradients", "one layer at work"))
        <= 25
    )


SHORT = dict(seq_length=1536, max_model_len=1536)
# a rank's base (dense part, experts), layer inputs, logits and trained adapters, GB; bytes of a token
BY_HAND = [
    (QWEN3, 16, dict(ep=8, infer_ep=8), Batch(), "3.1 7.2 0.5 6.2 2.0", 98_304),
    (QWEN15, 16, dict(ep=4, infer_ep=4), Batch(**SHORT), "3.7 6.2 0.2 3.7 1.0", 196_608),
    # by hand 0.3: it divided all of A and B by TP
    (DENSE, 8, dict(tp=2), Batch(micro_batch_size=2, **SHORT), "7.6 0.0 0.3 3.7 0.4", 57_344),
]


@pytest.mark.parametrize("shape, world, layout, batch, expected, token", BY_HAND)
def test_the_table_that_was_worked_out_by_hand(shape, world, layout, batch, expected, token):
    """Three configs at the layouts of the hand-made table, to the digits that were given."""
    memory = estimate(plan(shape, world, batch, **layout), MemorySettings())
    found = parts(memory, "update")
    names = ("frozen base, dense part", "frozen base, experts", "layer inputs kept", "logits")
    sizes = [found.get(name, 0.0) for name in names]
    sizes.append(found["adapters"] + found["gradients"] + found["AdamW"])
    assert " ".join(f"{size:.1f}" for size in sizes) == expected and memory.kv_token == token


def test_optimizer_state_is_shared_over_the_ranks_that_hold_the_same():
    """12 bytes a parameter: attention over DP 12, an expert over the 3 ranks that hold it. Without
    the distributed optimizer, whole.
    """
    it, settings = plan(QWEN3, 12, ep=4, infer_ep=4), MemorySettings()
    dense, experts = adapter_weights(it, settings, 0)
    assert parts(estimate(it, settings), "update")["AdamW"] == pytest.approx(
        (dense / 12 + experts / 3) * 12 / GB, rel=1e-6
    )
    alone = estimate(it, replace(settings, distributed_optimizer=False))
    assert parts(alone, "update")["AdamW"] == pytest.approx((dense + experts) * 12 / GB, rel=1e-6)


def test_offload_moves_what_is_trained_and_never_the_frozen_base():
    it = plan(QWEN3, 16, ep=16, infer_ep=16)
    awake = {}
    for flags in (
        {},
        {"offload_train_param": False},
        {"offload_train_grad": False},
        {"offload_train_optimizer": False},
    ):
        memory = estimate(it, MemorySettings(**flags))
        awake[tuple(flags)] = set(parts(memory, "rollout"))
        assert "frozen base, experts" in awake[tuple(flags)]
        assert memory.total("rollout") == pytest.approx(0.6 * 64 * GB, rel=1e-6)
    assert awake[()] & {"adapters", "gradients", "AdamW"} == set()
    assert [
        awake[(flag,)] - awake[()]
        for flag in ("offload_train_param", "offload_train_grad", "offload_train_optimizer")
    ] == [{"adapters"}, {"gradients"}, {"AdamW"}]
    full = estimate(replace(it, lora=False, share_backbone=False), MemorySettings())
    # without LoRA the weights are offloaded
    assert not any(name.startswith("weights") for name in parts(full, "rollout"))
    update = parts(full, "update")
    assert update["gradients"] == pytest.approx(
        2 * (update["weights, dense part"] + update["weights, experts"])
    )


def test_recomputation():
    it = plan(DENSE, 8)
    update = {layers: of_update(it, recompute_layers=layers) for layers in (7, 28)}
    none = of_update(it, recompute_layers=0)
    layer = layer_activations(it, 2560, 1) / GB
    assert none["activations kept"] == pytest.approx(28 * layer) and "layer inputs kept" not in none
    assert update[7]["activations kept"] == pytest.approx(21 * layer)
    assert (
        update[7]["layer inputs kept"] == pytest.approx(update[28]["layer inputs kept"] / 4)
        and "activations kept" not in update[28]
    )


def test_the_first_stage_keeps_more_micro_batches_and_the_last_has_the_logits():
    it = plan(QWEN3, 12, tp=1, pp=3, ep=4, infer_ep=4)
    memory = estimate(it, MemorySettings())
    assert memory.stage == 2 and parts(memory, "update")["frozen base, experts"] == pytest.approx(
        14.5 / 3, abs=0.05
    )
    first = estimate(it, MemorySettings(recompute_layers=0))
    kept = next(part for part in first.moments["update"] if part.name == "activations kept")
    assert (
        first.stage == 0
        and kept.how == "16 layers, 3 x 2560 tokens"
        and kept.bytes == 3 * 16 * layer_activations(it, 2560, 1)
    )
    assert "logits" not in parts(first, "update") and "logits" in parts(memory, "update")


@pytest.mark.parametrize(
    "shape, layout, settings, fits",
    [
        (QWEN3, dict(tp=4, pp=2, num_layer_list=(25, 23), infer_tp=4), MemorySettings(), False),
        (QWEN3, dict(pp=2, ep=8, num_layer_list=(40, 8), infer_ep=16), MemorySettings(), True),
        (
            DENSE,
            dict(pp=4, num_layer_list=(4, 14, 6, 4)),
            MemorySettings(enforce_eager=False),
            True,
        ),
        (DENSE, dict(pp=2, num_layer_list=(1, 27)), MemorySettings(32, 0.85), False),
    ],
)
def test_a_plan_fits_where_every_stage_does(shape, layout, settings, fits):
    it = plan(shape, 16, **layout)
    memory = estimate(it, settings)
    stages = [stage_memory(it, settings, stage) for stage in range(it.layout.pp)]
    assert memory.fits == all(stage.fits for stage in stages) == fits
    assert memory.peak == max(stage.peak for stage in stages)
    answer, limit = memory.kv_token * it.batch.max_model_len, settings.memory_gb * GB
    left = []
    for stage in stages:
        weights = parts(stage, "rollout")
        held = sum(
            size for name, size in weights.items() if name not in ("KV cache", "decode graphs")
        )
        left.append(settings.gpu_memory_utilization * limit - held * GB)
    assert memory.kv_stage == left.index(min(left))
    assert memory.answers_at_once == max(0, min(left)) // answer
    assert memory.kv_missing == pytest.approx(max(0, answer - min(left)), abs=1)
    if not fits:
        assert f"KV cache in pipeline stage {memory.kv_stage}" in memory.faults[-1]


def test_hccl_buffers_count_the_groups_that_send():
    it = plan(QWEN3, 12, tp=4, pp=3, infer_tp=4)
    assert communicators(it) == ["world", "TP", "PP", "EP", "vLLM TP", "vLLM EP", "vLLM MC2"]
    found = next(
        part
        for part in estimate(it, MemorySettings(hccl_buffer_mib=100)).moments["update"]
        if part.name == "HCCL buffers"
    )
    assert found.bytes == 7 * 2 * 100 * 2**20
    assert communicators(plan(DENSE, 1)) == []


def test_what_travels_in_a_weight_sync():
    """A table is gathered, joined and cut, and the one before it is still there; experts are held
    three times, by the base, by vLLM and on their way.
    """
    for name, copies in (("qwen25_1_5b", 2), ("qwen25_7b", 3)):
        shape = NAMED_SHAPES[name]
        table = of_sync(plan(shape, 8, tp=2))["embedding on its way"] * GB
        assert table == copies * shape.vocab_size * shape.hidden_size * 2
    sync = of_sync(plan(QWEN3, 12, ep=4, infer_ep=4))
    names = "frozen base, experts", "vLLM's weights, experts", "experts on their way"
    assert len({sync[name] for name in names}) == 1


def test_keys_and_values_are_divided_by_infer_tp():
    it = plan(DENSE, 8, infer_tp=4)
    memory = estimate(it, MemorySettings())
    assert memory.kv_token == 28 * 2 * (4 // 4) * 128 * 2
    assert (
        memory.answers_at_once == memory.kv_cache // (memory.kv_token * 2560)
        and memory.answers_needed == 64 * 8 // 2
    )


def test_decode_graphs_keep_what_they_read():
    it, settings = plan(QWEN3, 16, ep=16, infer_ep=16), MemorySettings(max_num_seqs=96)
    eager, captured = (estimate(it, replace(settings, enforce_eager=on)) for on in (True, False))
    graphs = 8 * GRAPH  # 1, 2, 4, ... 64, 96
    kept = captured.kv_cache + graphs
    vllm = sum(2 * count for count in rollout_weights(it))
    more = [captured.total(moment) - eager.total(moment) for moment in MOMENTS]
    assert dict(zip(MOMENTS, more)) == {
        "rollout": graphs,
        "weight sync": kept,
        "log-probs": kept + vllm,
        "update": kept + vllm,
    }
    assert captured.kv_cache == eager.kv_cache
