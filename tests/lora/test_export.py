"""Adapters sharded here into any Megatron layout come back whole; and real PEFT and transformers
read what is exported.
"""

import enum
import functools
import importlib
import json
import os
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mindspeed_qerl.families import ModelShape
from mindspeed_qerl.families.fingerprint import weights_digest
from mindspeed_qerl.lora import export
from mindspeed_qerl.lora.checkpoint import Adapters, load_adapters
from mindspeed_qerl.lora.export import save_merged, save_peft
from tests.tasks.gsm8k.tool import run_tool

HIDDEN, FFN, EXPERT_FFN, SHARED_FFN, EXPERTS, R, ALPHA = 24, 20, 12, 28, 8, 2, 6
HEADS, GROUPS, HEAD_DIM = 4, 2, 8  # head_dim is not hidden / heads
ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
}


def mlp_shapes(prefix, width):
    return {
        f"{prefix}.gate_proj": (width, HIDDEN),
        f"{prefix}.up_proj": (width, HIDDEN),
        f"{prefix}.down_proj": (HIDDEN, width),
    }


MIXTURE = {
    name: shape
    for i in range(EXPERTS)
    for name, shape in mlp_shapes(f"mlp.experts.{i}", EXPERT_FFN).items()
}
DENSE = SHAPES | mlp_shapes("mlp", FFN)
FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), DENSE),
    "qwen3_moe": SHAPES | MIXTURE,
    "qwen2_moe": SHAPES | MIXTURE | mlp_shapes("mlp.shared_expert", SHARED_FFN),
}
FUSED = {
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "up_proj": "gate_proj",
}  # they take the A of the other


def make_adapters(family, layers, dtype=torch.float32):
    generator = torch.Generator().manual_seed(layers)
    weights = {}
    for layer in range(layers):
        for name, (out, into) in FAMILIES[family].items():
            parent, _, leaf = f"model.layers.{layer}.{name}".rpartition(".")
            a = (
                weights[f"{parent}.{FUSED[leaf]}"][0]
                if leaf in FUSED
                else torch.randn(R, into, generator=generator).to(dtype)
            )
            weights[f"{parent}.{leaf}"] = a, torch.randn(out, R, generator=generator).to(dtype)
    return Adapters(weights, R, ALPHA, 3)


def shard(full, layer, t, tp, e, ep):
    """One layer's tensors on tensor rank t of tp and expert rank e of ep, as Megatron and
    MindSpeed-LLM name and lay them out.
    """

    def a(name):
        return full[f"model.layers.{layer}.{name}"][0]

    def b(name):
        return full[f"model.layers.{layer}.{name}"][1]

    def rows(tensor):
        return tensor.chunk(tp)[t]

    def columns(tensor):
        return tensor.chunk(tp, dim=1)[t]

    by_group = [b(f"self_attn.{name}_proj").chunk(GROUPS) for name in "qkv"]
    groups = rows(torch.arange(GROUPS)).tolist()
    interleaved = [part[group] for group in groups for part in by_group]
    pairs = {
        "self_attention.linear_qkv": (a("self_attn.q_proj"), torch.cat(interleaved)),
        "self_attention.linear_proj": (columns(a("self_attn.o_proj")), b("self_attn.o_proj")),
    }
    for ours, theirs in (("mlp", "mlp"), ("mlp.shared_experts", "mlp.shared_expert")):
        if f"model.layers.{layer}.{theirs}.gate_proj" in full:
            pairs[f"{ours}.linear_fc1"] = (
                a(f"{theirs}.gate_proj"),
                torch.cat([rows(b(f"{theirs}.gate_proj")), rows(b(f"{theirs}.up_proj"))]),
            )
            pairs[f"{ours}.linear_fc2"] = (
                columns(a(f"{theirs}.down_proj")),
                b(f"{theirs}.down_proj"),
            )
    tensors = {
        f"{name}.lora_{side}.default.weight": tensor.contiguous().clone()
        for name, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }
    tensors["self_attention.linear_qkv.lora_B.default._extra_state"] = None
    if f"model.layers.{layer}.mlp.experts.0.gate_proj" in full:
        local = EXPERTS // (tp * ep)
        mine = [f"mlp.experts.{e * tp * local + t * local + i}" for i in range(local)]

        def stacked(factor, *parts):
            whole = (torch.cat([factor(f"{name}.{part}") for part in parts]) for name in mine)
            return torch.stack([tensor.T for tensor in whole])

        stacks = {  # [experts, in, r], [experts, r, out]
            "weight1_lora_a": stacked(a, "gate_proj").reshape(HIDDEN, -1),
            "weight1_lora_b": stacked(b, "gate_proj", "up_proj").reshape(R, -1),
            "weight2_lora_a": stacked(a, "down_proj").reshape(-1, R),
            "weight2_lora_b": stacked(b, "down_proj").reshape(-1, HIDDEN),
        }
        tensors |= {f"mlp.experts.{name}": stack for name, stack in stacks.items()}
    return tensors


def write_checkpoint(
    folder,
    adapters,
    family,
    tp=1,
    stages=(2,),
    ep=1,
    targets=ALL,
    change=lambda rank, state: None,
    **more,
):
    """`stages`: layers of each pipeline stage. `change` may spoil a rank's state before it is
    written.
    """
    args = Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=len(stages),
        expert_model_parallel_size=ep,
        num_layers=sum(stages),
        num_experts=EXPERTS if "moe" in family else None,
        moe_tp_extend_ep="moe" in family,
        lora_r=R,
        lora_alpha=ALPHA,
        lora_target_modules=targets,
    )
    vars(args).update(more)
    for t, p, e in product(range(tp), range(len(stages)), range(ep)):
        model = {
            f"decoder.layers.{layer}.{name}": tensor
            for layer in range(stages[p])
            for name, tensor in shard(
                adapters.weights, sum(stages[:p]) + layer, t, tp, e, ep
            ).items()
        }
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": model}
        change((t, p, e), state)
        name = (
            f"mp_rank_{t:02d}"
            + (f"_{p:03d}" if len(stages) > 1 else "")
            + (f"_{e:03d}" if ep > 1 else "")
        )
        (folder / "iter_0000003" / name).mkdir(parents=True)
        torch.save(state, folder / "iter_0000003" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def load_trained(folder, family, iteration=None):
    """The adapters of a model of `family`."""
    more = {}
    if "moe" in family:
        more = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=EXPERT_FFN)
    if family == "qwen2_moe":
        more["shared_expert_intermediate_size"] = SHARED_FFN
    sizes = (2, HIDDEN, HEADS, GROUPS, HEAD_DIM, 0 if more else FFN, 64, 1e4, False, 64)
    return load_adapters(folder, ModelShape("small", family, *sizes, **more), iteration)


def assert_same(found, expected):
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=0)
    assert replace(found, weights={}) == replace(expected, weights={})


@pytest.mark.parametrize(
    "family, tp, stages, ep",
    [
        ("llama", 2, (1, 1), 1),
        ("qwen2", 1, (2,), 1),
        ("qwen2", 2, (2, 1), 1),
        ("qwen3", 2, (1, 1), 1),
        ("qwen3_moe", 1, (2,), 1),
        ("qwen3_moe", 2, (2,), 1),
        ("qwen3_moe", 2, (1, 2), 2),
        ("qwen2_moe", 1, (2,), 4),
        ("qwen2_moe", 2, (1, 1), 2),
    ],
)
def test_every_layout_gives_the_whole_tensors(tmp_path, family, tp, stages, ep):
    adapters = make_adapters(family, sum(stages), torch.bfloat16)
    assert_same(
        load_trained(write_checkpoint(tmp_path, adapters, family, tp, stages, ep), family), adapters
    )


def test_only_trained_adapters_are_read(tmp_path):
    """Base weights are in the file without lora_ckpt_filter, and adapters of experts whatever the
    targets.
    """

    def with_base(rank, state):
        state["model"]["decoder.layers.0.self_attention.linear_proj.base_layer.weight"] = (
            torch.ones(2)
        )
        state["model"]["decoder.final_layernorm.weight"] = torch.ones(2)

    adapters = make_adapters("qwen3_moe", 2)
    write_checkpoint(
        tmp_path,
        adapters,
        "qwen3_moe",
        targets=["linear_qkv", "linear_proj", "linear_fc2"],
        change=with_base,
    )
    trained = {
        module: pair
        for module, pair in adapters.weights.items()
        if not module.endswith(("gate_proj", "up_proj"))
    }
    assert_same(load_trained(tmp_path, "qwen3_moe"), Adapters(trained, R, ALPHA, 3))


class Harmful:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def test_foreign_objects_are_neither_needed_nor_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    (tmp_path / "megatron_like.py").write_text(
        "import enum\nclass Kind(enum.Enum):\n    one = 1\nclass Rows(list): pass\nclass "
        "Keys(dict): pass"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("megatron_like")

    def foreign(rank, state):
        state["args"].kind = module.Kind.one
        state["rng_state"] = [
            module.Rows([1, 2]),
            module.Keys(a=1),
            Harmful(),
            torch.bfloat16,
            b"bytes",
        ]
        state["opt_param_scheduler"] = enum.Enum

    adapters = make_adapters("qwen3", 2)
    write_checkpoint(tmp_path, adapters, "qwen3", change=foreign)
    monkeypatch.setitem(sys.modules, "megatron_like", None)  # cannot be imported
    assert_same(load_trained(tmp_path, "qwen3"), adapters)
    assert not (tmp_path / "harm").exists()
    file = tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    monkeypatch.setitem(sys.modules, "megatron_like", module)
    torch.load(file, weights_only=False)
    assert (tmp_path / "harm").exists()  # the file does harm those who trust it


def spoil_replica(rank, state):
    if rank[0] == 1:
        state["model"]["decoder.layers.1.mlp.linear_fc1.lora_A.default.weight"] += 1e-6


def other_layout(rank, state):
    if rank[0] == 1:
        state["args"] = Namespace(**{**vars(state["args"]), "pipeline_model_parallel_size": 2})


def forget_layer(rank, state):
    state["model"] = {
        name: tensor for name, tensor in state["model"].items() if ".layers.1." not in name
    }


def no_adapters(rank, state):
    state["model"] = {"decoder.final_layernorm.weight": torch.ones(2)}


def virtual_stages(rank, state):
    state["model0"] = state.pop("model")


def single_experts(rank, state):
    module = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"
    for side in "AB":
        state["model"][f"{module}.lora_{side}.default.weight"] = torch.ones(2, 2)


def adapted_head(rank, state):
    state["model"]["output_layer.lora_A.default.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (spoil_replica, r"mlp.linear_fc1.lora_A: ranks that should hold the same tensor do not"),
        (
            other_layout,
            r"mixes runs: mp_rank_00 is of .* 2, 1, 1, and mp_rank_01 of one with 2, 2, 1",
        ),
        (forget_layer, r"adapters of 1 layers, and the model has 2"),
        (no_adapters, r"no LoRA adapters"),
        (virtual_stages, r"virtual pipeline"),
        (single_experts, r"mlp.experts.local_experts.0.linear_fc1 has no name"),
        (adapted_head, r"output_layer.lora_A.default.weight is not an adapter of a decoder layer"),
    ],
)
def test_bad_checkpoints(tmp_path, change, message):
    write_checkpoint(tmp_path, make_adapters("qwen2", 2), "qwen2", tp=2, change=change)
    with pytest.raises(ValueError, match=message):
        load_trained(tmp_path, "qwen2")


def test_incomplete_checkpoints(tmp_path):
    adapters = make_adapters("qwen3_moe", 2)
    with pytest.raises(FileNotFoundError, match="holds no whole iter_0000001"):
        load_trained(tmp_path, "qwen3_moe")
    save = write_checkpoint(tmp_path / "save", adapters, "qwen3_moe", tp=2, ep=2)
    with pytest.raises(FileNotFoundError, match="no iteration 4; there are: 3"):
        load_trained(save, "qwen3_moe", 4)
    (save / "latest_checkpointed_iteration.txt").unlink()
    assert_same(load_trained(save, "qwen3_moe", 3), adapters)
    file = save / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    with pytest.raises(
        ValueError, match="mp_rank_01_001/model_optim_rng.pt cannot be read; it may be cut short"
    ):
        load_trained(save, "qwen3_moe", 3)
    file.unlink()
    with pytest.raises(ValueError, match="mp_rank_01_001 missing, or .* sizes 2, 1, 2; bring the"):
        load_trained(save, "qwen3_moe", 3)
    file.write_bytes(whole)
    write_checkpoint(save.parent / "other", adapters, "qwen3_moe")
    (save.parent / "other" / "iter_0000003" / "mp_rank_00").rename(
        save / "iter_0000003" / "mp_rank_00"
    )
    with pytest.raises(ValueError, match="mp_rank_00_000, .* or of another run: mp_rank_00 is of"):
        load_trained(save, "qwen3_moe", 3)
    save = write_checkpoint(tmp_path / "split", adapters, "qwen3_moe", tp=2, moe_tp_extend_ep=False)
    with pytest.raises(ValueError, match="without moe_tp_extend_ep, which splits each expert"):
        load_trained(save, "qwen3_moe")


either = pytest.mark.parametrize("save", [save_peft, save_merged])


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """base_model(family) -> folder of a random model in three files, made once."""

    @functools.cache
    def get(family):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            family,
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=FFN,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=HEAD_DIM,
            tie_word_embeddings=False,
            initializer_range=0.3,
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=EXPERT_FFN,
            **({"shared_expert_intermediate_size": SHARED_FFN} if family == "qwen2_moe" else {}),
            mlp_only_layers=[],
            decoder_sparse_step=1,
            bos_token_id=None,
            eos_token_id=1,
            max_position_embeddings=64,
        )
        folder = tmp_path_factory.mktemp(family) / "base"
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder, max_shard_size="20KB")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "pytorch_model.bin").write_text("an older copy")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder

    return get


def tensors_of(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")
def test_peft_and_the_merged_model_agree(tmp_path, base_model, family):
    adapters, base = make_adapters(family, 2), base_model(family)
    save_peft(adapters, base, tmp_path / "adapter")
    save_merged(adapters, base, tmp_path / "merged")
    tokens = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        plain, merged = load(base)(tokens).logits, load(tmp_path / "merged")(tokens).logits
        wrapped = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
        adapted = wrapped(tokens).logits
        assert (merged - plain).abs().max() > 1
        torch.testing.assert_close(adapted, merged, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            wrapped.merge_and_unload()(tokens).logits, merged, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merged_weights_are_rounded_once(tmp_path, base_model, dtype):
    base = tmp_path / "base"
    load(base_model("qwen2_moe")).to(dtype).save_pretrained(base, max_shard_size="20KB")
    adapters = make_adapters("qwen2_moe", 2, torch.bfloat16)
    share = save_merged(adapters, base, tmp_path / "merged")
    assert share == pytest.approx(1, abs=1e-3)
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    # to nearest, but bfloat16 to one of two neighbours
    unit_roundoff = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)
    for name, weight in before.items():
        assert after[name].dtype == dtype
        if name.removesuffix(".weight") not in adapters.weights:
            assert torch.equal(after[name], weight), name
            continue
        a, b = (tensor.double() for tensor in adapters.weights[name.removesuffix(".weight")])
        exact = weight.double() + ALPHA / R * b @ a
        size = (
            weight.double().abs() + ALPHA / R * b.abs() @ a.abs()
        )  # of what is added up in float32
        assert (
            (after[name].double() - exact).abs() <= unit_roundoff * exact.abs() + 8 * 2**-24 * size
        ).all(), name


def test_the_merged_folder_is_the_base_folder(tmp_path, base_model):
    base = base_model("qwen3_moe")
    save_merged(make_adapters("qwen3_moe", 2), base, tmp_path / "new" / "merged")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["merged"]
    names = {path.name for path in base.iterdir()}
    assert {path.name for path in (tmp_path / "new" / "merged").iterdir()} == names - {
        "pytorch_model.bin"
    }
    for file in base.iterdir():
        copy = tmp_path / "new" / "merged" / file.name
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as theirs, safe_open(copy, "pt") as ours:
                assert set(theirs.keys()) == set(ours.keys()) and ours.metadata() == {
                    **theirs.metadata(),
                    "run": "",
                    "iteration": "3",
                }
        elif file.suffix != ".bin":
            assert copy.read_bytes() == file.read_bytes()


@either
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, base_model, save):
    base, out = base_model("qwen3"), tmp_path / "out"
    whole = make_adapters("qwen3", 2)
    few = {module: pair for module, pair in whole.weights.items() if ".layers.1." not in module}
    wide = whole.weights | {
        "model.layers.1.mlp.up_proj": (torch.ones(R, HIDDEN), torch.ones(99, R))
    }
    for weights, message in [
        (few, r"has model\.layers\.1\.\S+\.weight, for which the checkpoint holds no adapter"),
        (make_adapters("qwen3", 3).weights, r"has no model.layers.2.self_attn.q_proj.weight"),
        (
            wide,
            rf"layers.1.mlp.up_proj.weight is \[{FFN}, {HIDDEN}\] there, .* for \[99, {HIDDEN}\]",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            save(Adapters(weights, R, ALPHA, 3), base, out)
    with pytest.raises(
        ValueError, match=r"neither model.safetensors.index.json nor model.safetensors"
    ):
        save(whole, tmp_path, out)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(
        next(base.glob("*.safetensors")).read_bytes()[:-1]
    )
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read; it may be cut short"):
        save(whole, tmp_path / "cut", out)
    out.mkdir()
    save(whole, base, out)  # an empty folder is as good as none
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="exists already"):
        save(whole, base, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == before == ["cut", "out"]


@either
def test_a_base_of_the_same_shape_with_other_weights_is_refused(tmp_path, base_model, save):
    base = base_model("qwen3")
    adapters = replace(make_adapters("qwen3", 2), base=weights_digest(base))
    other = tmp_path / "other"
    shutil.copytree(base, other)
    for file in other.glob("*.safetensors"):
        save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    here, trained = weights_digest(other)[:12], adapters.base[:12]
    with pytest.raises(
        ValueError,
        match="other is not the model that was trained: its weights are others .digest "
        f"{here}, the trained model's was {trained}",
    ):
        save(adapters, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save(adapters, base, tmp_path / "out")


@either
def test_a_write_that_fails_leaves_nothing(tmp_path, base_model, save, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save(make_adapters("qwen3", 2), base_model("qwen3"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_tool(tmp_path, base_model):
    adapters, base = make_adapters("qwen3_moe", 2), base_model("qwen3_moe")
    save = write_checkpoint(tmp_path / "save", adapters, "qwen3_moe", ep=2)

    def run(*arguments):
        command = ["--checkpoint", save, "--base", base, "--output", tmp_path / "out"]
        return run_tool("export_adapter", *command, *arguments)

    done = run()
    assert done.returncode == 0, done.stderr
    assert "iteration 3: 56 modules" in done.stdout and "r 2, alpha 6" in done.stdout
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).samefile(base)
    again = run("--merged")
    assert again.returncode == 1 and "exists already" in again.stderr
    assert again.stderr.startswith("export_adapter: ") and again.stderr.count("\n") == 1
    shutil.rmtree(tmp_path / "out")
    done = run("--merged")
    assert done.returncode == 0 and "whose weights have 100.00% of the update" in done.stdout
