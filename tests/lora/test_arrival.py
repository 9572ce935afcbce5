"""The proof of arrival on planted failures, each of a kind that a public report describes."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_qerl.lora import held as held_module
from mindspeed_qerl.lora.arrival import (
    OTHER_FORM,
    UNCHANGED,
    Arrival,
    scaled_adapters,
    syncs_to_see,
)
from mindspeed_qerl.lora.held import Held, held_adapters, held_parts, not_compared

LAYER = "model.layers.0."
NAMES = (
    f"{LAYER}self_attn.q_proj.weight",
    f"{LAYER}mlp.gate_proj.weight",
    f"{LAYER}mlp.up_proj.weight",
    f"{LAYER}mlp.experts.0.up_proj.weight",
    f"{LAYER}mlp.experts.1.up_proj.weight",
    f"{LAYER}input_layernorm.weight",
)


def model(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (16,) if "norm" in name else (16, 16) for name in NAMES}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def parts(tensors):
    return [
        Held(name, tensor, (0,) * tensor.dim())
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def synced(*models, elements=64):
    """One sync of each."""
    arrival = Arrival(elements)
    for tensors in models:
        arrival.begin()
        for name, tensor in tensors.items():
            arrival.expect(name, tensor)
    return arrival


PLANTED = {
    # report: (what the rollout model has otherwise than was sent, the tensors that are named, the
    # word for it)
    "never delivered": (
        lambda sent, before: before,
        NAMES,
        "it is still what the sync before had sent",
    ),
    "routed experts all zero": (
        lambda sent, before: {n: torch.zeros(16, 16) for n in NAMES[3:5]},
        NAMES[3:5],
        "all of it is 0",
    ),
    "moved but transposed": (
        lambda sent, before: {NAMES[0]: sent[NAMES[0]].t()},
        NAMES[:1],
        "it is transposed",
    ),
    "gate and up exchanged": (
        lambda sent, before: {NAMES[1]: sent[NAMES[2]], NAMES[2]: sent[NAMES[1]]},
        NAMES[1:3],
        "it is model.layers.0.mlp.",
    ),
    "expert in the place of another": (
        lambda sent, before: {NAMES[3]: sent[NAMES[4]]},
        NAMES[3:4],
        f"it is {NAMES[4]}",
    ),
    "bound to no module": (
        lambda sent, before: {NAMES[2]: None},
        NAMES[2:3],
        "no module of the rollout model has it",
    ),
    "not a number": (
        lambda sent, before: {NAMES[5]: torch.full((16,), torch.nan)},
        NAMES[5:],
        "it has NaN",
    ),
    "scaled twice": (
        lambda sent, before: {NAMES[0]: 2 * sent[NAMES[0]]},
        NAMES[:1],
        "it is 2 times what was sent",
    ),
    "rounded": (
        lambda sent, before: {NAMES[1]: sent[NAMES[1]].bfloat16().float()},
        NAMES[1:2],
        "it was rounded to bfloat16",
    ),
}


@pytest.mark.parametrize("report", PLANTED)
def test_a_planted_failure_is_named(report):
    plant, names, problem = PLANTED[report]
    before, sent = model(1), model(2)
    arrival = synced(before, sent)
    assert arrival.failures(parts(sent)) == []
    held = sent | plant(sent, before)
    failures = arrival.failures(parts(held))
    assert [failure.name for failure in failures] == sorted(names)
    assert all(failure.problem.startswith(problem) for failure in failures)


def test_a_stale_tensor_is_named_in_every_sync_and_an_unchanged_one_is_told():
    """The sampled elements are others in each sync, and those of the sync before are at hand."""
    arrival = Arrival(8)
    for seed in range(1, 12):
        for name, tensor in model(seed).items():
            arrival.expect(name, tensor)
        if seed > 1:
            problems = {failure.problem for failure in arrival.failures(parts(model(seed - 1)))}
            assert problems == {"it is still what the sync before had sent"}
        assert arrival.failures(parts(model(seed))) == [] and not arrival.unchanged
        arrival.begin()
        for name, tensor in model(seed).items():
            arrival.expect(name, tensor)
        assert arrival.unchanged
        arrival.begin()


def test_a_fault_of_one_block_is_seen_in_the_syncs_that_are_promised():
    """A block of 8 x 8 in 64 x 64 that is never loaded; 100 tensors, 8 elements of each."""
    promised = syncs_to_see(64, 64 * 64, 8)
    assert promised == 37 and syncs_to_see(64, 64 * 64, 0) == syncs_to_see(1, 64, 64) == 1
    arrival = Arrival(8)
    unseen = {}
    for number in range(100):  # the samples of tensors of one shape are the same: blocks differ
        row, column = 6 * (number // 10), 6 * (number % 10)
        unseen[f"{number}.weight"] = (slice(row, row + 8), slice(column, column + 8))
    seen_after = []
    for sync in range(1, promised + 1):
        arrival.begin()
        held = {}
        for name, block in unseen.items():
            sent = torch.full((64, 64), float(sync))
            arrival.expect(name, sent)
            held[name] = sent.clone()
            held[name][block] = 0
        for name, _ in arrival.failures(parts(held)):
            unseen.pop(name)
            seen_after.append(sync)
    assert len(unseen) <= 4  # one in the mean
    assert sum(sync <= promised // 4 for sync in seen_after) < 98  # and not much sooner


@pytest.mark.parametrize("held_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sent_dtype", [torch.float32, torch.bfloat16])
def test_no_right_sync_is_a_failure(sent_dtype, held_dtype):
    """Rounded to the engine's dtype, cut over four ranks, of few elements or all."""
    for seed in range(250):
        sent = model(seed, sent_dtype)
        arrival = synced(sent, elements=(1, 8, 64, 0)[seed % 4])
        for rank in range(4):
            held = []
            for name, tensor in sent.items():
                rows = tensor.to(held_dtype).chunk(4)[rank]
                held.append(Held(name, rows, (rank * len(rows),) + (0,) * (tensor.dim() - 1)))
            assert arrival.failures(held) == []


def test_stacked_experts_and_names_of_peft_are_those_of_the_model():
    arrival = Arrival(0)
    gate_up, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    arrival.expect("model.mlp.experts.gate_up_proj", gate_up)
    arrival.expect("base_model.model.model.mlp.experts.down_proj", down)
    arrival.expect("base_model.model.model.q_proj.base_layer.weight", down[0])
    held = {"model.q_proj.weight": down[0]}
    for expert in range(2):
        held[f"model.mlp.experts.{expert}.gate_proj.weight"] = gate_up[expert, :3]
        held[f"model.mlp.experts.{expert}.up_proj.weight"] = gate_up[expert, 3:]
        held[f"model.mlp.experts.{expert}.down_proj.weight"] = down[expert]
    assert arrival.sent.keys() == held.keys()
    assert arrival.failures(parts(held)) == []


def test_adapters_are_served_with_their_scaling():
    config = {"r": 4, "lora_alpha": 8, "use_rslora": True}
    tensors = {"q_proj.lora_A.weight": torch.ones(4, 8), "q_proj.lora_B.weight": torch.ones(8, 4)}
    scaled = dict(scaled_adapters(tensors, config))
    assert torch.equal(scaled["q_proj.lora_A.weight"], torch.ones(4, 8))
    assert torch.equal(scaled["q_proj.lora_B.weight"], torch.full((8, 4), 4.0))


@pytest.mark.parametrize("is_shared, row", [(True, 8), (False, 0)])
def test_a_layer_that_ranks_do_not_share_is_compared_on_each(is_shared, row):
    """vLLM's ReplicatedLinear, a router, has the rank of its group as well."""
    model, gate = torch.nn.Module(), torch.nn.Linear(4, 8, bias=False)
    model.gate, gate.tp_rank, gate.input_size, gate.output_size = gate, 1, 4, 8
    if is_shared:
        gate.output_size_per_partition = 8
    assert [held.start for held in held_parts(model)] == [(row, 0)]


@pytest.mark.parametrize("width", [4, 8])  # gate above up is square, or down is
@pytest.mark.parametrize("is_npu", [False, True])
def test_square_expert_weights_are_told_from_their_transposes(width, is_npu):
    """vllm-ascend holds experts as [in, out]."""
    gate_up, down = torch.randn(2, 2 * width, 8), torch.randn(2, 8, width)
    model, experts = torch.nn.Module(), torch.nn.Module()
    model.experts, experts.hidden_size = experts, 8
    for name, weight in (("w13_weight", gate_up), ("w2_weight", down)):
        held = weight.transpose(1, 2) if is_npu else weight
        setattr(experts, name, torch.nn.Parameter(held.contiguous()))
    parts = {held.name: held.part for held in held_parts(model)}
    for expert in range(2):
        assert torch.equal(parts[f"experts.{expert}.gate_proj.weight"], gate_up[expert, :width])
        assert torch.equal(parts[f"experts.{expert}.up_proj.weight"], gate_up[expert, width:])
        assert torch.equal(parts[f"experts.{expert}.down_proj.weight"], down[expert])


def layer(rows, columns, sizes=None, weight=None, **attributes):
    """vLLM's linear layer of one rank, of `rows` in all."""
    module = torch.nn.Linear(columns, rows, bias=False)
    if weight is not None:
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
    sizes = sizes or [rows]
    whole = {"input_size": columns, "output_size": rows, "output_partition_sizes": sizes}
    shards = {"output_size_per_partition": sum(sizes), "tp_rank": 0}
    vars(module).update(whole | shards | attributes)
    return module


def names_of(failures):
    return [name for name, _ in failures]


def test_a_stage_of_a_pipeline_is_judged_by_what_it_should_have():
    """As vLLM does it: a layer of another stage is a PPMissingLayer."""
    missing = type("PPMissingLayer", (torch.nn.Identity,), {})
    sent = {f"layers.{number}.up.weight": torch.randn(4, 4) for number in range(2)}
    lost = {"layers.1.typo.weight": torch.ones(2), "layers.2.up.weight": torch.ones(2)}
    for stage in range(2):
        layers = [missing(), missing()]
        layers[stage] = torch.nn.ModuleDict({"up": layer(4, 4)})
        layers[stage]["up"].weight.data = sent[f"layers.{stage}.up.weight"]
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
        arrival = synced(sent)
        assert arrival.failures(held_parts(model), not_compared(model)) == []
        assert [*arrival.not_compared] == [f"layers.{1 - stage}.up.weight"]
        arrival = synced(sent | lost)
        named = names_of(arrival.failures(held_parts(model), not_compared(model)))
        assert named == ([*lost] if stage == 1 else ["layers.2.up.weight"])


@pytest.mark.parametrize("is_stale", [True, False])
def test_what_is_fused_in_the_files_is_cut_for_each_rank(is_stale):
    """Phi-3 on two ranks that share one key and value head; its adapters are not compared."""
    q, k, v, gate, up = (torch.randn(rows, 6) for rows in (8, 2, 2, 4, 4))
    whole = {"qkv_proj": torch.cat((q, k, v)), "gate_up_proj": torch.cat((gate, up))}
    sent = {f"{name}.weight": tensor for name, tensor in whole.items()}
    adapters = {f"{name}.lora_B.weight": torch.randn(8, 2) for name in whole}
    for rank in range(2):
        model = torch.nn.Module()
        model.packed_modules_mapping = {name: [name] for name in whole}
        cut = {
            "qkv_proj": ((q.chunk(2)[rank], k, v), {"num_kv_head_replicas": 2}),
            "gate_up_proj": ((gate.chunk(2)[rank], up.chunk(2)[rank]), {}),
        }
        for name, (shards, attributes) in cut.items():
            sizes = [len(shard) for shard in shards]
            held = torch.cat(shards)
            if is_stale and rank:
                held[-1] += 1
            wrapper = torch.nn.Module()
            wrapper.base_layer = layer(
                sum(sizes) * 2, 6, sizes, held, tp_rank=rank, tp_size=2, **attributes
            )
            wrapper.lora_a_stacked = wrapper.lora_b_stacked = (torch.zeros(1, 1, 8, 8),)
            setattr(model, name, wrapper)
        arrival = synced(sent | adapters, elements=0)
        held = [*held_parts(model), *held_adapters(model, 0)]
        failures = arrival.failures(held, not_compared(model))
        named = sorted(f"{name}.weight" for name in whole) if is_stale and rank else []
        assert names_of(failures) == named
        assert arrival.not_compared == dict.fromkeys(adapters, held_module.PACKED)


def experts(backend):
    module = torch.nn.Module()
    module.hidden_size = 4
    module.w13_weight = torch.nn.Parameter(torch.zeros(1, 6, 4))
    module.w2_weight = torch.nn.Parameter(torch.zeros(1, 4, 3))
    kind = SimpleNamespace(name=backend)
    module.quant_method = SimpleNamespace(unquantized_backend=kind)
    return module


SQUARE = torch.ones(4, 4).to(torch.float8_e4m3fn)
SCALED = layer(4, 4, weight=SQUARE[:2].t())
SCALED.weight_scale = torch.nn.Parameter(torch.ones(4, 1))
UNREADABLE = {
    # what vLLM holds, what is sent for it, why it is not compared
    "packed integers": (
        layer(4, 4, weight=torch.ones(4, 1, dtype=torch.int32)),
        "w.weight",
        held_module.QUANTIZED,
    ),
    "8-bit floats": (layer(4, 4, weight=SQUARE), "w.weight", held_module.QUANTIZED),
    "the same, transposed": (SCALED, "w.weight", held_module.QUANTIZED),
    "their scales": (SCALED, "w.weight_scale", held_module.QUANTIZED),
    "swapped experts": (experts("FLASHINFER_CUTLASS"), "w.0.up_proj.weight", held_module.SHUFFLED),
    "fused by no known rule": (layer(4, 4, [1, 3]), "w.weight", held_module.PACKED),
    "a part of no known place": (torch.nn.Linear(4, 2, bias=False), "w.weight", OTHER_FORM),
    "another number of axes": (torch.nn.Conv1d(1, 4, 4, bias=False), "w.weight", OTHER_FORM),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_taken_apart_is_counted_and_never_a_failure(case):
    model = torch.nn.Module()
    model.w, name, reason = UNREADABLE[case]
    arrival = synced({name: torch.ones(4, 4), "other.weight": torch.ones(2)})
    failures = arrival.failures(held_parts(model), not_compared(model))
    assert names_of(failures) == ["other.weight"]
    assert arrival.not_compared == {name: reason}


def test_known_experts_and_a_quantized_sender():
    model = torch.nn.Module()
    model.w = experts("TRITON")
    arrival = synced({"w.0.up_proj.weight": torch.ones(3, 4)})
    assert names_of(arrival.failures(held_parts(model))) == ["w.0.up_proj.weight"]
    model.w = layer(4, 4)
    arrival = synced({"w.weight": SQUARE})
    assert arrival.failures(held_parts(model)) == []
    assert arrival.not_compared == {"w.weight": OTHER_FORM}


def test_elements_that_a_sparse_sync_leaves_are_not_compared():
    """vLLM's patches have NaN there (checkpoint_weight_patch.py)."""
    weight, patch = torch.randn(4, 4), torch.full((4, 4), torch.nan)
    patch[1, :2] = torch.tensor([5.0, 6.0])
    after = torch.where(patch.isnan(), weight, patch)
    wrong, broken = after.clone(), after.clone()
    wrong[1, 1], broken[0, 0] = 7.0, torch.nan
    arrival = synced({"a.weight": weight}, {"a.weight": patch}, elements=0)
    for held, problem in (
        (after, None),
        (wrong, "1 of 16 sampled elements differ"),
        (weight, "it is still what the sync before had sent"),
        (broken, "it has NaN"),
    ):
        found = arrival.failures(parts({"a.weight": held}))
        assert [each.problem for each in found] == ([problem] if problem else [])
    arrival = synced({"a.weight": weight}, {"a.weight": torch.full((4, 4), torch.nan)})
    assert arrival.failures(parts({"a.weight": weight})) == []
    assert arrival.not_compared == {"a.weight": UNCHANGED}
