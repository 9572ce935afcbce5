"""The layout rules: verdicts that are known, each rule by itself, and all of them against a
simulation of what would happen.
"""

import random
import re
from dataclasses import replace

import pytest

from mindspeed_qerl.families import NAMED_SHAPES, ModelShape
from mindspeed_qerl.layout.planner import new_plan
from mindspeed_qerl.layout.rules import RULES, broken
from mindspeed_qerl.recipe.types import Batch, Layout
from tests.layout.dealing import DENSE, QWEN3, QWEN15, can_run


def plan(shape=QWEN3, batch=None, **layout):
    return new_plan(
        shape,
        Layout(
            **{
                "world": 16,
                "ep": 16 if shape is QWEN3 else 1,
                "infer_ep": 16 if shape is QWEN3 else 1,
                **layout,
            }
        ),
        batch,
    )


# rule -> a plan that breaks it and nothing else, and what the message must say
EXAMPLES = {
    "two_ranks": (plan(DENSE, world=1), "1 NPU: it takes at least 2"),
    "ranks_fill_training_groups": (
        plan(QWEN15, Batch(20, 20), world=10, pp=4, ep=1, infer_ep=2),
        "10 ranks cannot be divided by TP 1 x PP 4 = 4",
    ),
    "ranks_fill_expert_groups": (
        plan(QWEN15, world=12, pp=2, ep=4, infer_ep=4),
        "12 ranks cannot be divided by TP 1 x EP 4 x PP 2 = 8",
    ),
    "ranks_fill_nodes": (
        plan(DENSE, world=20, ranks_per_node=16),
        "20 ranks cannot be divided by 16 ranks a node",
    ),
    "vocabulary_by_tp": (
        plan(
            replace(
                DENSE,
                num_attention_heads=30,
                num_key_value_heads=10,
                intermediate_size=18945,
                vocab_size=152064,
            ),
            world=5,
            tp=5,
        ),
        "152,064 rows of the embedding cannot be divided by TP 5",
    ),
    "vocabulary_is_vllms": (
        replace(plan(DENSE), padded_vocab_size=152065),
        "padded_vocab_size 152,065 must be 152,064, the rows of vLLM's embedding",
    ),
    "layers_by_pp": (plan(DENSE, world=16, pp=16), "28 layers cannot be divided by PP 16"),
    "layer_list_has_a_number_for_each_stage": (
        plan(DENSE, pp=4, num_layer_list=(14, 14)),
        "num_layer_list 14,14 has 2 numbers for PP 4",
    ),
    "layer_list_sums_to_the_layers": (
        plan(DENSE, pp=2, num_layer_list=(14, 13)),
        "num_layer_list 14,13 sums to 27, the model has 28 layers",
    ),
    "shared_backbone_has_adapters": (replace(plan(DENSE), lora=False), "share_backbone needs LoRA"),
    "dense_model_without_ep": (plan(DENSE, ep=2, infer_ep=2), "EP 2 with a dense model"),
    "experts_need_sequence_parallelism": (
        replace(plan(tp=4, ep=4), layout=replace(plan(tp=4, ep=4).layout, sequence_parallel=False)),
        "must be true for a mixture of experts with tensor_model_parallel_size = 4",
    ),
    "dispatcher_has_ranks": (
        replace(plan(ep=1), lora=False, share_backbone=False),
        "TP 1 x EP 1 without LoRA",
    ),
    "ranks_fill_infer_groups": (
        plan(world=24, ranks_per_node=24, ep=8, infer_ep=16),
        "24 ranks cannot be divided by infer TP 1 x EP 16 = 16",
    ),
    "infer_groups_hold_whole_training_groups": (
        plan(ep=16, infer_ep=8),
        "infer TP 1 x EP 8 = 8 is no multiple of training's TP 1 x EP 16 = 16",
    ),
    "tensor_parallel_sizes_divide": (
        plan(
            replace(
                DENSE,
                num_attention_heads=24,
                num_key_value_heads=12,
                intermediate_size=18432,
                vocab_size=153600,
            ),
            world=12,
            tp=4,
            infer_tp=6,
            ranks_per_node=12,
        ),
        "TP 4 and infer TP 6: neither is a multiple of the other",
    ),
    "stages_hold_whole_infer_tp_groups": (
        plan(DENSE, world=4, pp=4, infer_tp=4),
        "1 ranks a stage (4 / PP 4) cannot be divided by infer TP 4",
    ),
    "vocabulary_by_infer_tp": (
        plan(
            replace(DENSE, num_attention_heads=30, num_key_value_heads=10, intermediate_size=18945),
            world=5,
            infer_tp=5,
        ),
        "152,064 rows of vLLM's embedding cannot be divided by infer TP 5",
    ),
    "experts_by_infer_ranks": (
        plan(QWEN15, ep=4, infer_ep=8),
        "60 experts cannot be divided by infer TP 1 x EP 8 = 8",
    ),
    "infer_experts_are_spread": (
        plan(ep=1, infer_ep=1),
        "the first weight sync fails; at least 2 ranks",
    ),
    "shared_expert_is_summed": (
        plan(QWEN15, world=12, tp=4, ep=3, infer_tp=2, infer_ep=6),
        "infer TP 2 with a shared expert",
    ),
    "answers_fit_vllm": (
        plan(DENSE, Batch(max_model_len=2048)),
        "seq_length 2560 is above max_model_len 2048",
    ),
    "prompts_fit_the_scheduler": (
        plan(DENSE, Batch(max_num_batched_tokens=2048)),
        "max_num_batched_tokens 2048 is below max_model_len 2560",
    ),
    "batch_by_training_dp": (
        plan(DENSE, Batch(60, 64), world=16, infer_tp=4),
        "60 prompts of global_batch_size cannot be divided by training DP 16",
    ),
    "batch_by_infer_dp": (
        plan(DENSE, Batch(60, 60), world=16, tp=4),
        "60 prompts of global_batch_size cannot be divided by vLLM's 16 replicas",
    ),
    "batch_by_nodes": (
        plan(DENSE, Batch(4, 4), tp=4, infer_tp=4, ranks_per_node=2),
        "4 prompts of global_batch_size cannot be divided by 8 nodes",
    ),
    "share_by_micro_batch": (
        plan(DENSE, Batch(micro_batch_size=5)),
        "32 answers of a training rank cannot be divided by micro_batch_size 5",
    ),
    "mini_batch_by_training_dp": (
        plan(DENSE, Batch(64, 62, samples_per_prompt=4), tp=1),
        "248 answers of a mini-batch cannot be divided by training DP 16",
    ),
    "mini_batches_are_equal": (
        plan(DENSE, Batch(64, 48), tp=1),
        "32 answers of a training rank cannot be divided by the 24 of its mini-batch",
    ),
    "mini_batch_by_micro_batch": (
        plan(DENSE, Batch(64, 16, micro_batch_size=16)),
        "8 answers of a rank's mini-batch cannot be divided by micro_batch_size 16",
    ),
    "removed_padding_resets_the_mask": (
        plan(DENSE, Batch(use_remove_padding=True)),
        "use_remove_padding needs megatron_training.reset_attention_mask",
    ),
    "dynamic_batches_need_removed_padding": (
        plan(DENSE, Batch(use_dynamic_bsz=True)),
        "use_dynamic_bsz needs rl_config.use_remove_padding: true",
    ),
    "dynamic_batches_take_an_answer": (
        plan(
            DENSE,
            Batch(
                use_remove_padding=True,
                reset_attention_mask=True,
                use_dynamic_bsz=True,
                update_max_packing_token_size=2000,
            ),
        ),
        "update_max_packing_token_size 2000 is below seq_length 2560",
    ),
    "removed_padding_varies_in_a_pipeline": (
        plan(
            DENSE,
            Batch(use_remove_padding=True, reset_attention_mask=True, no_pad_to_seq_lengths=False),
            pp=2,
        ),
        "use_remove_padding with PP 2 needs megatron_training.no_pad_to_seq_lengths",
    ),
    "experts_by_training_ranks": (
        plan(QWEN15, ep=8, infer_ep=8),
        "60 experts cannot be divided by TP 1 x EP 8 = 8",
    ),
}
for part, changed, tp, things in (
    ("heads", {"num_attention_heads": 30}, 4, "30 attention heads"),
    ("kv_heads", {"num_attention_heads": 32}, 8, "4 KV heads"),
    ("width", {"intermediate_size": 18946}, 4, "18,946 columns of the MLP"),
):
    shape, words = replace(DENSE, **changed), f"{things} cannot be divided by"
    EXAMPLES[f"{part}_by_tp"] = plan(shape, tp=tp), f"{words} TP {tp}"
    EXAMPLES[f"{part}_by_infer_tp"] = plan(shape, infer_tp=tp), f"{words} infer TP {tp}"
# rules that no plan breaks without the one behind them
TOGETHER = {
    "experts_by_training_ranks": "experts_by_infer_ranks",
    "ranks_fill_training_groups": "ranks_fill_expert_groups",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_rule_by_itself(name):
    it, message = EXAMPLES[name]
    faults = broken(it)
    assert {fault.rule for fault in faults} == {name, TOGETHER.get(name, name)}
    assert message in "\n".join(fault.message for fault in faults if fault.rule == name)


def test_every_rule_has_an_example_and_a_source():
    assert {rule.name for rule in RULES} == EXAMPLES.keys()
    source = re.compile(
        r"(MindSpeed-RL|MindSpeed-LLM|MindSpeed|Megatron-LM|vllm|vllm-ascend) \S+\.py:\d+"
    )
    for rule in RULES:
        assert source.fullmatch(rule.source), rule


def test_the_vocabulary_is_padded_as_vllm_does():
    """1,000 tokens are 1,024 rows (DEFAULT_VOCAB_PADDING_SIZE 64): they divide by 16, not by 5."""
    small = replace(
        DENSE,
        vocab_size=1000,
        num_attention_heads=80,
        num_key_value_heads=80,
        intermediate_size=160,
    )
    assert not broken(plan(small, tp=16, infer_tp=16))
    assert {fault.rule for fault in broken(plan(small, world=5, tp=5, infer_tp=5))} == {
        "vocabulary_by_tp",
        "vocabulary_by_infer_tp",
    }
    assert not broken(replace(plan(small), padded_vocab_size=1024))
    assert [fault.rule for fault in broken(replace(plan(small), padded_vocab_size=1000))] == [
        "vocabulary_is_vllms"
    ]


def test_a_list_of_layers_goes_where_they_do_not_divide():
    assert not broken(plan(DENSE, pp=8, num_layer_list=(4, 4, 4, 4, 3, 3, 3, 3)))


def random_plan(draw):
    """Sizes that divide more often than not, of real and of odd models, so that legal and illegal
    plans are both common.
    """
    shape = draw.choice(
        [
            QWEN3,
            QWEN15,
            DENSE,
            NAMED_SHAPES["qwen25_1_5b"],
            NAMED_SHAPES["qwen3_32b"],
            ModelShape("odd", "qwen3_moe", 12, 96, 12, 6, 8, 0, 64 * 9, 1e6, False, 512, 24, 2, 48),
            ModelShape(
                "odd", "qwen2_moe", 6, 96, 6, 3, 8, 0, 64 * 3, 1e6, False, 512, 18, 2, 48, 54
            ),
            ModelShape("odd", "qwen2", 10, 80, 12, 12, 8, 90, 1000, 1e6, True, 512),
        ]
    )
    world = draw.choice([1, 2, 3, 4, 6, 8, 10, 12, 16, 18, 20, 24, 32, 36, 48])

    def size(most):
        divisors = [n for n in range(1, most + 1) if most % n == 0]
        return draw.choice(divisors) if draw.random() < 0.85 else draw.randint(1, 8)

    tp = size(draw.choice([1, 2, 4, shape.num_key_value_heads]))
    pp = size(draw.choice([1, 2, 3, 4]))
    ep = size(max(1, world // (tp * pp))) if shape.moe else draw.choice([1] * 9 + [2])
    infer_tp = size(draw.choice([1, tp, 2 * tp, shape.num_key_value_heads]))
    infer_ep = (
        size(draw.choice([tp * ep, max(1, world // infer_tp)]))
        if shape.moe
        else draw.choice([1, 1, 1, 2])
    )
    made = new_plan(
        shape,
        Layout(
            world,
            tp=tp,
            pp=pp,
            ep=ep,
            infer_tp=infer_tp,
            infer_ep=infer_ep,
            ranks_per_node=draw.choice([16, 16, 16, 8, 4, 6, 12]),
        ),
    )
    if draw.random() < 0.7:
        return made
    prompts = draw.choice([made.batch.global_batch_size, draw.randint(1, 96)])
    return replace(
        made,
        batch=Batch(
            prompts,
            draw.choice([prompts, prompts, size(prompts)]),
            samples_per_prompt=draw.choice([2, 4, 8]),
            micro_batch_size=draw.choice([1, 1, 2, 3]),
        ),
    )


@pytest.mark.parametrize("seed", range(8))
def test_brute_force_against_dealing(seed):
    draw, verdicts = random.Random(seed), {True: 0, False: 0}
    for _ in range(1700):
        it = random_plan(draw)
        faults = broken(it)
        assert can_run(it) == (not faults), (it, [fault.message for fault in faults])
        verdicts[not faults] += 1
    assert min(verdicts.values()) > 200, verdicts
