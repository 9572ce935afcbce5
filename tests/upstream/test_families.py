"""What MindSpeed-LLM's converters know, against docs/ascend.md and our families."""

import json
import re

import pytest
import torch
from checkpoints import write_base_checkpoint
from rehearsal import ROOT, emulated, make_config, make_model, run_python

from mindspeed_qerl.ascend.resume import conversion_command
from mindspeed_qerl.families import FAMILIES
from mindspeed_qerl.recipe.reader import read_recipe


def test_each_model_that_the_converters_know_is_built_or_refused_with_a_reason(upstream):
    file = upstream / "MindSpeed-LLM" / "configs" / "checkpoint" / "model_cfg.json"
    names = set(json.loads(file.read_text())["model_mappings"]) - {"base"}
    section = (ROOT / "docs" / "ascend.md").read_text().split("## Models\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \|", section, re.MULTILINE)
    refused = set(re.findall("`(.*?)`", " ".join(rows)))
    built = {family.conversion.name for family in FAMILIES.values()}
    assert not built & refused and built | refused == names


@pytest.mark.parametrize("model", ["llama", "Llama-3.2-1B"])
def test_llama_is_converted_bit_for_bit(model, upstream, tmp_path, monkeypatch):
    """By the command of the engine, tied or not, to two ranks."""
    folder = make_model(model, tmp_path / "model")
    file = folder / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "torch_dtype": "bfloat16"}))  # docs/ascend.md says why
    load = {"actor_config.load": str(tmp_path / "load")}
    config = make_config(model, folder, tmp_path, tmp_path, tp=2, changes=load)
    command = conversion_command(read_recipe(config))[1:]
    done = run_python(command, emulated(upstream, 16), upstream / "MindSpeed-LLM")
    assert (tmp_path / "load" / "latest_checkpointed_iteration.txt").is_file(), done.stderr[-3000:]
    wanted = write_base_checkpoint(folder, tmp_path / "expected", tp=2)
    monkeypatch.syspath_prepend(upstream / "Megatron-LM")  # the files hold enums of megatron.core
    for rank in wanted.rglob("*.pt"):
        expected, given = (
            torch.load(each / rank.relative_to(wanted), weights_only=False)["model"]
            for each in (wanted, tmp_path / "load")
        )
        if values["tie_word_embeddings"]:
            del expected["output_layer.weight"]
        assert all(torch.equal(given.pop(key), expected[key]) for key in expected)
        assert all(key.endswith("._extra_state") for key in given)  # empty
