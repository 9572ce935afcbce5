"""What a model family is: its sizes, what Megatron and transformers are told of them, its linear
layers. Sizes only: no torch here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass as values_or_dict

from mindspeed_qerl.common.errors import ConfigError

from .config import ConfigJson, is_old, resolve, unread_by_4
from .sizes import Count, Number, Size, checked, head_dim_of

if TYPE_CHECKING:
    from mindspeed_qerl.routing.routes import Routers

Arguments = dict[str, Any]  # of a library, by its own names
# config.json key -> the values that every family here has; another one is a model with other layers
# or other tensors
ALIKE = {
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
}
# what a config.json must state, since the default is another model's
STATED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
MOST_LAYERS = 10_000
STATED_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")

# What Megatron takes for a key that the config leaves out: MindSpeed-RL hands on the defaults of
# config_cls/megatron_config.py:MegatronConfig, but for None and false
# (utils/utils.py:parse_args_from_config), for which those of Megatron-LM's
# megatron/training/arguments.py and MindSpeed-LLM's count. All sources agree
# (tests/upstream/test_megatron_defaults.py). None for the others.
MEGATRON_DEFAULTS: Arguments = yaml.safe_load(
    Path(__file__).with_name("megatron.yaml").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class Linear:
    """A linear layer of one transformer layer.

    Attributes:
        target: Megatron's name for it, which is a LoRA target; gate and up are one, and so are q, k
            and v.
        inputs, outputs: of the whole layer.
        split: what tensor parallel ranks share: "column" (outputs), "row" (inputs), or "expert":
            whole ones are dealt to ranks.
        copies: how many a layer has; active: how many of them a token meets.
    """

    target: str
    inputs: int
    outputs: int
    split: str
    copies: int = 1
    active: int = 1


@values_or_dict(frozen=True)
class Llama3Rope:
    """Rotary positions of Llama 3.1 and later, by the keys of config.json's rope_scaling."""

    factor: Number
    low_freq_factor: Number
    high_freq_factor: Number
    original_max_position_embeddings: Number  # Megatron reads it as a float


@values_or_dict(frozen=True, config=ConfigDict(strict=True))
class ModelShape:
    """A model's sizes, by the keys of a Hugging Face config.json. `intermediate_size` is the width
    of a dense MLP, 0 if every layer has experts; the expert fields are 0 in a dense model.
    """

    name: str
    model_type: str
    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    intermediate_size: Count
    vocab_size: Size
    rope_theta: Number
    tie_word_embeddings: bool
    max_position_embeddings: Size
    num_experts: Count = 0
    num_experts_per_tok: Count = 0
    moe_intermediate_size: Count = 0
    shared_expert_intermediate_size: Count = 0
    norm_topk_prob: bool = False
    rms_norm_eps: Number = 1e-6
    rope_scaling: Llama3Rope | None = None  # or a dict of its values

    @model_validator(mode="after")
    def _has_an_mlp(self) -> "ModelShape":
        top = self.num_experts_per_tok
        experts = self.num_experts
        if top > experts:
            raise ValueError(f"num_experts_per_tok = {top} must be at most num_experts = {experts}")
        for key in STATED_EXPERTS if experts else ("intermediate_size",):
            if not getattr(self, key):
                raise ValueError(f"{key} = 0 must be at least 1")
        return self

    @property
    def moe(self) -> bool:
        return self.num_experts > 0

    @property
    def kv_numbers(self) -> int:
        """Counts the numbers in the keys and values of one token."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def rope(self) -> Arguments:
        """Returns the rotary positions as config.json's rope_parameters have them."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling:
            rope |= asdict(self.rope_scaling) | {"rope_type": "llama3"}
        return rope

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one layer that LoRA knows."""
        h = self.hidden_size
        d = self.head_dim
        q = self.num_attention_heads * d
        kv = self.num_key_value_heads * d
        width = self.intermediate_size + self.shared_expert_intermediate_size
        linears = [
            Linear("linear_qkv", h, q + 2 * kv, "column"),
            Linear("linear_proj", q, h, "row"),
        ]
        if width:
            linears.append(Linear("linear_fc1", h, 2 * width, "column"))
            linears.append(Linear("linear_fc2", width, h, "row"))
        if self.moe:
            f = self.moe_intermediate_size
            copies = self.num_experts, self.num_experts_per_tok
            linears.append(Linear("linear_fc1", h, 2 * f, "expert", *copies))
            linears.append(Linear("linear_fc2", f, h, "expert", *copies))
        return tuple(linears)

    @property
    def routers(self) -> "Routers":
        """Every layer has one, or none has (ALIKE)."""
        from mindspeed_qerl.routing.routes import Routers  # numpy: a plan goes without

        return Routers(
            tuple(range(self.num_hidden_layers if self.moe else 0)),
            self.num_experts,
            self.num_experts_per_tok,
        )


@dataclass(frozen=True)
class Conversion:
    """Describes how MindSpeed-LLM converts a family's weights: the script, its name for the family,
    and what the family needs besides.
    """

    script: str
    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A model family: RMSNorm before attention and MLP, rotary positions, SwiGLU, and what the
    fields say.

    Attributes:
        model_type: of config.json. architecture: of transformers and vLLM.
        adaptor: the class of MindSpeed-RL (workers/resharding/weight_adaptor.py) that syncs the
            weights. params_mapping: pairs (Megatron's part of a name, vLLM's) before its own.
        qk_norm: queries and keys are normalized. qkv_bias: their projections have biases.
        experts: every layer routes tokens to experts. shared_expert: and has one for all tokens,
            with a gate.
        own_head_dim: heads may be of any width, not hidden_size / num_attention_heads.
        megatron: arguments of Megatron that the family needs besides.
    """

    model_type: str
    architecture: str
    conversion: Conversion
    adaptor: str
    params_mapping: tuple[tuple[str, str], ...] = ()
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    shared_expert: bool = False
    own_head_dim: bool = False
    megatron: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, config: ConfigJson, name: str) -> ModelShape:
        """The shape in a config.json of this family, as transformers reads it.

        Raises:
            ConfigError: a size is missing or impossible, a value is of a model with other layers,
                or transformers refuses it.
        """
        stated = {key for key, value in config.items() if value is not None}
        if "num_local_experts" in stated:  # as transformers 5 writes it
            stated.add("num_experts")
        needed = STATED_EXPERTS if self.experts else ("intermediate_size",)
        missing = [key for key in (*STATED, *needed) if key not in stated]
        if missing:
            raise ConfigError(f"config.json does not state {', '.join(missing)}")
        layers = config["num_hidden_layers"]
        if not isinstance(layers, int) or layers > MOST_LAYERS:  # transformers makes a list of them
            raise ConfigError(f"num_hidden_layers = {layers!r} is no number of layers")
        values = resolve(config)
        given = {key: value for key, value in values.items() if value is not None}
        for key in self._not_read:
            given.pop(key, None)
        usual = head_dim_of(given.get("hidden_size"), given.get("num_attention_heads"))
        given.setdefault("head_dim", usual)
        given.setdefault("tie_word_embeddings", False)
        rope = values["rope"] or {}
        given |= {"name": name, "rope_theta": rope.get("rope_theta")}
        given["rope_scaling"] = rope if rope.get("rope_type") == "llama3" else None
        if self.experts:
            given["intermediate_size"] = 0
        shape = checked(ModelShape, given)
        faults = unread_by_4(config) if is_old(values["transformers_version"]) else []
        alike = dict(ALIKE)
        if not self.shared_expert:
            alike["shared_expert_intermediate_size"] = (None, 0)
        for key, built in alike.items():
            if values.get(key) not in built:
                faults.append(
                    f"{key} = {values[key]!r} in config.json is not modelled here: layouts and "
                    "memory would be another model's"
                )
        if not self.own_head_dim and shape.head_dim != usual:  # vLLM's class does not read it
            faults.append(
                f"head_dim = {shape.head_dim} in config.json must be hidden_size / "
                f"num_attention_heads = {usual} for model_type {self.model_type!r}"
            )
        if faults:
            raise ConfigError(*faults)
        return shape

    @property
    def _not_read(self) -> set[str]:
        """Keys of a config.json that are the sizes of other families."""
        keys: set[str] = set()
        if not self.experts:
            keys |= {*STATED_EXPERTS, "norm_topk_prob"}
        if not self.shared_expert:
            keys.add("shared_expert_intermediate_size")
        return keys

    def _layers(self, shape: ModelShape) -> Arguments:
        """Returns what Megatron's arguments and its TransformerConfig call by the same name."""
        layers: Arguments = dict(
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        if self.experts:
            layers["moe_router_topk"] = shape.num_experts_per_tok
            layers["moe_ffn_hidden_size"] = shape.moe_intermediate_size
        return layers

    def megatron_arguments(self, shape: ModelShape) -> Arguments:
        """Every argument that Megatron must be told of the model, in MindSpeed-RL's form: it builds
        another model with a default of its own.
        """
        arguments = self._layers(shape) | dict(
            use_mcore_models=True,
            group_query_attention=True,
            disable_bias_linear=True,
            swiglu=True,
            norm_epsilon=shape.rms_norm_eps,
            position_embedding_type="rope",
            rotary_base=_whole(shape.rope_theta),
            rope_scaling_type=None,
            untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
        )
        if shape.rope_scaling:
            scaling = asdict(shape.rope_scaling)
            scaling["rope_scaling_factor"] = scaling.pop("factor")
            arguments |= scaling | {"rope_scaling_type": "llama3"}
        if not self.experts:
            return arguments | dict(
                ffn_hidden_size=shape.intermediate_size, num_experts=None, **self.megatron
            )
        # Megatron counts in widths of an expert
        copies = shape.shared_expert_intermediate_size / shape.moe_intermediate_size
        return arguments | dict(
            num_experts=shape.num_experts,
            norm_topk_prob=shape.norm_topk_prob,
            n_shared_experts=_whole(copies) or None,
            moe_router_load_balancing_type="aux_loss",
            **self.megatron,
        )

    def transformer_config(self, shape: ModelShape) -> Arguments:
        """The fields of megatron-core's TransformerConfig that describe the model."""
        from torch.nn.functional import silu

        config = self._layers(shape) | dict(
            ffn_hidden_size=shape.intermediate_size or shape.moe_intermediate_size,
            gated_linear_unit=True,
            activation_func=silu,
            layernorm_epsilon=shape.rms_norm_eps,
            add_bias_linear=False,
        )
        if self.experts:
            config |= dict(
                num_moe_experts=shape.num_experts,
                moe_router_pre_softmax=not shape.norm_topk_prob,
                moe_router_load_balancing_type="none",
                moe_router_dtype="fp32",
                moe_shared_expert_intermediate_size=shape.shared_expert_intermediate_size or None,
            )
        return config

    def hf_config(self, shape: ModelShape) -> Arguments:
        """The sizes as config.json has them, but for ModelShape.rope, which transformers 5 keeps
        elsewhere than 4.
        """
        left_out = self._not_read | {"name", "model_type", "rope_theta", "rope_scaling"}
        return {key: value for key, value in asdict(shape).items() if key not in left_out}

    def other_parameters(self, shape: ModelShape, tp: int) -> int:
        """Parameters of one layer on one of `tp` ranks that are in none of `linears`: norms,
        biases, router, the shared expert's gate.
        """
        h = shape.hidden_size
        d = shape.head_dim
        count = 2 * h + h * shape.num_experts
        if self.qkv_bias:
            count += (shape.num_attention_heads + 2 * shape.num_key_value_heads) * d // tp
        if self.qk_norm:
            count += 2 * d
        if shape.shared_expert_intermediate_size:
            count += h
        return count


def _whole(number: float) -> int | float:
    """An int where there is one: Megatron's argparse does not read 1e6 as a whole number."""
    return int(number) if number.is_integer() else number
