"""Shapes of the models: what layouts and memory follow from. Field names are those of a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.config import ConfigError, unknown

DENSE, MOE = ("qwen2", "qwen3"), ("qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes. `intermediate_size` is the width of a dense MLP, 0 if every layer has experts; the expert fields are 0 in a dense
    model."""

    name: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def moe(self) -> bool:
        return self.num_experts > 0

    @property
    def qk_norm(self) -> bool:
        return self.model_type.startswith("qwen3")

    @property
    def qkv_bias(self) -> bool:
        return self.model_type.startswith("qwen2")


SHAPES = {shape.name: shape for shape in (
    ModelShape("qwen3_30b_a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 0, 151936, 1e6, False, 40960, 128, 8, 768, 0, True),
    # rope_theta of the 2507 models is believed, not known: read_shape of the model's own directory decides
    ModelShape("qwen3_30b_a3b_2507", "qwen3_moe", 48, 2048, 32, 4, 128, 0, 151936, 1e7, False, 262144, 128, 8, 768, 0, True),
    ModelShape("qwen15_moe_a2_7b", "qwen2_moe", 24, 2048, 16, 16, 128, 0, 151936, 1e6, False, 8192, 60, 4, 1408, 5632, False),
    ModelShape("qwen25_1_5b", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 1e6, True, 32768),
    ModelShape("qwen25_7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 1e6, False, 32768),
    ModelShape("qwen25_32b", "qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 1e6, False, 32768),
    ModelShape("qwen3_8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, False, 40960),
    ModelShape("qwen3_32b", "qwen3", 64, 5120, 64, 8, 128, 25600, 151936, 1e6, False, 40960),
)}


def read_shape(source: str | Path) -> ModelShape:
    """The shape of a known model's name, of a Hugging Face model directory, or of a config.json.

    Raises:
        ConfigError: no such name or file, no JSON object, an unsupported model_type, or a missing size.
    """
    if str(source) in SHAPES:
        return SHAPES[str(source)]
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(unknown("model", str(source), SHAPES) + ", or the directory of a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} holds no JSON object")
    return shape_of(config, path.parent.name)


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in the keys of a config.json; ConfigError names a model_type that is not supported or a size that is missing."""
    kind = config.get("model_type")
    if kind not in DENSE + MOE:
        raise ConfigError(f"{name}: " + unknown("model_type", kind, DENSE + MOE))
    moe = kind in MOE
    needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size",
              *(["num_experts_per_tok", "moe_intermediate_size"] if moe else ["intermediate_size"])]
    values = {key: config.get(key) for key in needed}
    if moe:
        values["num_experts"] = config.get("num_experts") or config.get("num_local_experts")  # transformers 5 writes the second
        values["shared_expert_intermediate_size"] = config.get("shared_expert_intermediate_size", 0)
        values["norm_topk_prob"] = bool(config.get("norm_topk_prob", False))
    for key, value in values.items():
        if isinstance(value, bool) == (key != "norm_topk_prob") or not isinstance(value, int):
            raise ConfigError(f"{name}: {key} = {value!r} in config.json must be a whole number")
    heads = values["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # transformers 5 writes the first
    return ModelShape(
        name=name, model_type=kind, **{"intermediate_size": 0, **values},
        num_key_value_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or values["hidden_size"] // heads,
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=config.get("max_position_embeddings", 32768))
