"""Checkpoints of the real upstream: base weights beside its converter's and through a run; exported
adapters.
"""

import pytest
import torch
from checkpoints import held, rank_files
from reference import ALPHA, SCALING, R, full_weights, shard
from rehearsal import LAYERS, finished, make_config, run_engine

from mindspeed_qerl.local.checkpoint import load_adapters
from mindspeed_qerl.lora.export import save_merged, save_peft


def load_rank(file):
    return torch.load(file, weights_only=False)["model"]


def load_hf(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_base_weights_go_through_a_run_unchanged(upstream, tiny, tmp_path, monkeypatch):
    """Without LoRA, at a learning rate that is 0 to float32: what the run saves is what it loaded,
    name by name. The converter knows no Qwen2-MoE.
    """
    monkeypatch.syspath_prepend(upstream / "Megatron-LM")  # the run's arguments have its enums
    base = tmp_path / "base"
    sizes = dict(npus=2, tp=2, infer_ep=2, train_iters=1, base=base)
    changes = {"actor_config.lr": 1e-50, "rl_config.share_backbone": False}
    config = make_config("qwen2_moe", *tiny("qwen2_moe"), tmp_path, **sizes, changes=changes)
    for key in ("lora_r", "lora_alpha", "lora_ckpt_filter", "lora_target_modules"):
        del config["megatron_training"][key]
    run = finished(run_engine(config, upstream, tmp_path), tmp_path / "rehearsal")
    for file, *_ in rank_files(base / "iter_0000001", 2, 1, 1, LAYERS):
        before, after = load_rank(file), load_rank(run.checkpoints_dir / file.relative_to(base))
        assert before.keys() == {name for name in after if not name.endswith("_extra_state")}
        assert all(torch.equal(before[name], after[name]) for name in before), file


def local_delta(name, weights):
    """(alpha / r) of the product of a rank's own adapters of its tensor `name`; None if there are
    none.
    """
    if f"{name}_lora_a" in weights:
        a, b = (weights[f"{name}_lora_{side}"].float() for side in "ab")
        experts = a.shape[1] // R if name.endswith("1") else b.shape[0] // R
        product = a.view(experts, -1, R) @ b.view(experts, R, -1)
        return (
            SCALING * product.view(a.shape[0], -1)
            if name.endswith("1")
            else SCALING * product.view(-1, b.shape[1])
        )
    module = name.removesuffix(".weight")
    if f"{module}.lora_A.default.weight" not in weights:
        return None
    return (
        SCALING
        * weights[f"{module}.lora_B.default.weight"].float()
        @ weights[f"{module}.lora_A.default.weight"].float()
    )


@pytest.mark.parametrize(
    ("family", "npus", "tp", "pp", "ep"), [("qwen2_moe", 2, 2, 1, 1), ("qwen3_moe", 2, 1, 2, 1)]
)
def test_the_exported_model_is_the_trained_one(
    family, npus, tp, pp, ep, upstream, tiny, tmp_path, monkeypatch
):
    """On every rank of a real run: merged minus base, sharded as in training, is the product of the
    rank's own adapters.
    """
    monkeypatch.syspath_prepend(upstream / "Megatron-LM")
    model, data = tiny(family)
    layout = dict(npus=npus, tp=tp, pp=pp, ep=ep, infer_ep=2)
    sizes = dict(train_iters=2, base=tmp_path / "base")
    config = make_config(family, model, data, tmp_path, **layout, **sizes)
    run = finished(run_engine(config, upstream, tmp_path), tmp_path / "rehearsal")
    adapters = load_adapters(run.checkpoints_dir, model)
    assert (adapters.rank, adapters.alpha, adapters.iteration) == (R, ALPHA, 2)
    save_merged(adapters, model, tmp_path / "merged", dtype=torch.float32)
    merged = load_hf(tmp_path / "merged")
    before, after = full_weights(load_hf(model)), full_weights(merged)
    change = {name: after[name] - before[name] for name in before}
    for file, stage, place in rank_files(run.checkpoints_dir / "iter_0000002", tp, pp, ep, LAYERS):
        weights = load_rank(file)
        for name in held(before, stage, pp):
            expected = local_delta(name, weights)
            assert (expected is not None) == (
                ".linear_" in name and "bias" not in name or ".experts." in name
            ), name
            if expected is None:
                assert not shard(name, change, {}, place).any()
            else:
                assert expected.abs().max() > 1e-4
                torch.testing.assert_close(
                    shard(name, change, {}, place), expected, rtol=0, atol=1e-7
                )
    if family == "qwen3_moe":  # peft 0.7.1 refuses the adapter of a Qwen2-MoE (save_peft says so)
        from peft import PeftModel

        save_peft(adapters, model, tmp_path / "adapter")
        tokens = torch.arange(96).view(4, 24)
        with torch.no_grad():
            adapted = PeftModel.from_pretrained(load_hf(model), tmp_path / "adapter")(tokens).logits
            torch.testing.assert_close(adapted, merged(tokens).logits, rtol=1e-3, atol=1e-3)
