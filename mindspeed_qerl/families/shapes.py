"""Shapes of the models: what layouts and memory follow from. Field names are those of a Hugging Face config.json."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError, unknown

DENSE, MOE = ("qwen2", "qwen3"), ("qwen2_moe", "qwen3_moe")
LARGEST = 10 ** 9  # of any one size
NOT_MODELLED = {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1), "quantization_config": (None, {})}  # key -> what changes nothing


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
        ConfigError: no such name or file, no JSON object, an unsupported model_type, a size that is missing or impossible, or a key that
            makes another model of it.
    """
    if str(source) in SHAPES:
        return SHAPES[str(source)]
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{source} has no config.json: not the directory of a Hugging Face model")
    elif not path.is_file():
        raise ConfigError(unknown("model", str(source), SHAPES) + ", or the directory of a Hugging Face model")
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} holds no JSON object")
    return shape_of(config, Path(os.path.abspath(path.parent)).name or str(path))


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape in the keys of a config.json; ConfigError names a model_type that is not supported, a value that is missing or impossible,
    or a key that is not modelled."""
    kind = config.get("model_type")
    if kind not in DENSE + MOE:
        raise ConfigError(f"{name}: " + unknown("model_type", kind, DENSE + MOE))
    for key, harmless in NOT_MODELLED.items():
        if config.get(key) not in harmless:
            raise ConfigError(f"{name}: {key} = {config[key]!r} in config.json is not modelled here: layouts and memory would be another model's")

    def fault(key: str, value: Any, rule: str) -> ConfigError:
        return ConfigError(f"{name}: {key} = {value!r} in config.json must be {rule}")

    def size(key: str, value: Any, low: int = 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= LARGEST:
            raise fault(key, value, f"a whole number of at least {low} and at most {LARGEST:,}")
        return value

    def truth(key: str) -> bool:
        if not isinstance(config.get(key, False), bool):
            raise fault(key, config[key], "true or false")
        return config.get(key, False)

    sizes = {key: size(key, config.get(key)) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}
    if kind in MOE:
        experts = "num_experts" if config.get("num_experts") is not None else "num_local_experts"  # transformers 5 writes the second
        sizes["num_experts"] = size("num_experts", config.get(experts))
        sizes |= {key: size(key, config.get(key)) for key in ("num_experts_per_tok", "moe_intermediate_size")}
        sizes["shared_expert_intermediate_size"] = size("shared_expert_intermediate_size", config.get("shared_expert_intermediate_size", 0), low=0)
        if sizes["num_experts_per_tok"] > sizes["num_experts"]:
            raise fault("num_experts_per_tok", sizes["num_experts_per_tok"], f"at most num_experts = {sizes['num_experts']}")
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    derived = hidden // heads if config.get("head_dim") is None else config["head_dim"]
    return ModelShape(
        name=name, model_type=kind, **sizes, intermediate_size=0 if kind in MOE else size("intermediate_size", config.get("intermediate_size")),
        num_key_value_heads=size("num_key_value_heads", config.get("num_key_value_heads", heads)), head_dim=size("head_dim", derived),
        rope_theta=_rope_theta(config, fault), tie_word_embeddings=truth("tie_word_embeddings"),
        max_position_embeddings=size("max_position_embeddings", config.get("max_position_embeddings", 32768)),
        norm_topk_prob=kind in MOE and truth("norm_topk_prob"))


def _rope_theta(config: Mapping[str, Any], fault: Callable[[str, Any, str], ConfigError]) -> float:
    """rope_theta of its own, or the one in rope_parameters (transformers 5) or rope_scaling; 10000 if none says it."""
    theta = config.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if rope is not None and not isinstance(rope, Mapping):
            raise fault(key, rope, "an object or null")
        theta = (rope or {}).get("rope_theta") if theta is None else theta
    theta = 10000.0 if theta is None else theta
    if not isinstance(theta, (int, float)) or isinstance(theta, bool) or not 0 < theta < 1e30:
        raise fault("rope_theta", theta, "a finite number above 0")
    return float(theta)
