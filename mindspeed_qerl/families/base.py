"""What a model family is: its sizes, what Megatron and transformers are told of them, its linear
layers. Sizes only: no torch here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families.config import is_old, resolve, unread_by_4
from mindspeed_qerl.families.keys import Keys

if TYPE_CHECKING:
    from mindspeed_qerl.routing.routes import Routers

# config.json key -> the values that every family here has; another one is a model with other layers
# or other tensors
ALIKE = {
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
}


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, by the keys of a Hugging Face config.json. `intermediate_size` is the width
    of a dense MLP, 0 if every layer has experts; the expert fields are 0 in a dense model.
    """

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
    rms_norm_eps: float = 1e-6

    @property
    def moe(self) -> bool:
        return self.num_experts > 0

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


@dataclass(frozen=True)
class Conversion:
    """How MindSpeed-LLM converts a family's weights: the script, its name for the family, and what
    the family needs besides.
    """

    script: str
    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Adaptor:
    """What of MindSpeed-RL's weight adaptors (workers/resharding/weight_adaptor.py) syncs a family:
    a class there, pairs (Megatron's part of a name, vLLM's) before its own params_mapping, and
    corrections (wrong, right) of the Megatron names that it makes of vLLM's.
    """

    base: str
    params_mapping: tuple[tuple[str, str], ...] = ()
    corrections: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Family:
    """A model family: RMSNorm before attention and MLP, rotary positions, SwiGLU, and what the
    fields say.

    Attributes:
        model_type: of config.json. architecture: of transformers and vLLM.
        qk_norm: queries and keys are normalised. qkv_bias: their projections have biases.
        experts: every layer routes tokens to experts. shared_expert: and has one for all tokens,
            with a gate.
        own_head_dim: heads may be of any width, not hidden_size / num_attention_heads.
        named: shapes known by name, for planning without the model.
        conversion, adaptor: None if the NPU engine cannot run the family.
        megatron: arguments of Megatron that the family needs besides. extra_arguments: the same
            where MindSpeed-RL has no key for them.
    """

    model_type: str
    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    shared_expert: bool = False
    own_head_dim: bool = False
    named: tuple[ModelShape, ...] = ()
    conversion: Conversion | None = None
    adaptor: Adaptor | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)
    extra_arguments: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, config: Mapping[str, Any], name: str) -> ModelShape:
        """The shape in a config.json of this family, as transformers reads it.

        Raises:
            ConfigError: a size is missing or impossible, a value is of a model with other layers,
                or transformers refuses it.
        """
        self._check_stated(config, name)
        try:
            values = resolve(config)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        keys = Keys(values, " in config.json")
        if is_old(values["transformers_version"]):
            keys.faults += unread_by_4(config)
        alike = ALIKE
        if not self.shared_expert:
            alike = {**ALIKE, "shared_expert_intermediate_size": (None, 0)}
        for key, built in alike.items():
            if values.get(key) not in built:
                keys.faults.append(
                    f"{key} = {values[key]!r} in config.json is not modelled here: layouts and "
                    "memory would be another model's"
                )
        heads, hidden = keys.size("num_attention_heads"), keys.size("hidden_size")
        experts, top, width, shared = 0, 0, 0, 0
        if self.experts:
            experts, top = keys.size("num_experts"), keys.size("num_experts_per_tok")
            width = keys.size("moe_intermediate_size")
            if top > experts:
                keys.fault("num_experts_per_tok", top, f"at most num_experts = {experts}")
        if self.shared_expert:
            shared = keys.size("shared_expert_intermediate_size", low=0)
        head_dim = self._head_dim(keys, hidden // heads)
        shape = ModelShape(
            name=name,
            model_type=self.model_type,
            num_hidden_layers=keys.size("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=keys.size("num_key_value_heads"),
            head_dim=head_dim,
            intermediate_size=0 if self.experts else keys.size("intermediate_size"),
            vocab_size=keys.size("vocab_size"),
            rope_theta=keys.number("rope_theta", values["rope"].get("rope_theta")),
            tie_word_embeddings=keys.truth("tie_word_embeddings"),
            max_position_embeddings=keys.size("max_position_embeddings"),
            num_experts=experts,
            num_experts_per_tok=top,
            moe_intermediate_size=width,
            shared_expert_intermediate_size=shared,
            norm_topk_prob=self.experts and keys.truth("norm_topk_prob"),
            rms_norm_eps=keys.number("rms_norm_eps", values.get("rms_norm_eps")),
        )
        keys.check(name)
        return shape

    def _head_dim(self, keys: Keys, usual: int) -> int:
        if keys.values.get("head_dim") is None:
            keys.values = {**keys.values, "head_dim": usual}
        head_dim = keys.size("head_dim")
        if not self.own_head_dim and head_dim != usual:  # vLLM's class does not read it
            rule = f"hidden_size / num_attention_heads = {usual} for model_type {self.model_type!r}"
            keys.fault("head_dim", head_dim, rule)
        return head_dim

    def _check_stated(self, config: Mapping[str, Any], name: str) -> None:
        """ConfigError for a size that a config.json must state, since the default is another
        model's, and for values that are none.
        """
        keys = Keys(config, " in config.json")
        needed = ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"]
        if self.experts:
            needed += ["num_experts_per_tok", "moe_intermediate_size"]
            of_5 = config.get("num_experts") is None and "num_local_experts" in config
            needed.append("num_local_experts" if of_5 else "num_experts")
        else:
            needed.append("intermediate_size")
        optional = ["num_key_value_heads", "head_dim", "max_position_embeddings"]
        for key in needed + [key for key in optional if config.get(key) is not None]:
            keys.size(key)
        if config.get("shared_expert_intermediate_size") is not None:
            keys.size("shared_expert_intermediate_size", low=0)
        for key in ("tie_word_embeddings", "norm_topk_prob"):
            keys.truth(key)
        for place in ("rope_scaling", "rope_parameters"):
            rope = config.get(place)
            if rope is not None and not isinstance(rope, Mapping):
                keys.fault(place, rope, "an object or null")
            elif rope and rope.get("rope_theta") is not None:
                keys.number("rope_theta", rope["rope_theta"])
        for key in ("rope_theta", "rms_norm_eps"):
            if config.get(key) is not None:
                keys.number(key, config[key])
        keys.check(name)

    def megatron_arguments(self, shape: ModelShape) -> dict[str, Any]:
        """Every argument that Megatron must be told of the model, in MindSpeed-RL's form: it builds
        another model with a default of its own.
        """
        groups, shared = shape.num_key_value_heads, shape.shared_expert_intermediate_size
        arguments = dict(
            use_mcore_models=True,
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            group_query_attention=True,
            num_query_groups=groups,
            kv_channels=shape.head_dim,
            add_qkv_bias=self.qkv_bias,
            qk_layernorm=self.qk_norm,
            disable_bias_linear=True,
            swiglu=True,
            normalization="RMSNorm",
            norm_epsilon=shape.rms_norm_eps,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta)
            if shape.rope_theta.is_integer()
            else shape.rope_theta,
            untie_embeddings_and_output_weights=not shape.tie_word_embeddings,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        if not self.experts:
            return arguments | dict(
                ffn_hidden_size=shape.intermediate_size, num_experts=None, **self.megatron
            )
        copies = shared / shape.moe_intermediate_size  # Megatron counts in widths of an expert
        return arguments | dict(
            num_experts=shape.num_experts,
            moe_router_topk=shape.num_experts_per_tok,
            moe_ffn_hidden_size=shape.moe_intermediate_size,
            norm_topk_prob=shape.norm_topk_prob,
            n_shared_experts=(int(copies) if copies.is_integer() else copies) or None,
            moe_router_load_balancing_type="aux_loss",
            **self.megatron,
        )

    def transformer_config(self, shape: ModelShape) -> dict[str, Any]:
        """The fields of megatron-core's TransformerConfig that describe the model."""
        from torch.nn.functional import silu

        config = dict(
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim,
            ffn_hidden_size=shape.intermediate_size or shape.moe_intermediate_size,
            gated_linear_unit=True,
            activation_func=silu,
            normalization="RMSNorm",
            layernorm_epsilon=shape.rms_norm_eps,
            qk_layernorm=self.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        if self.experts:
            config |= dict(
                num_moe_experts=shape.num_experts,
                moe_router_topk=shape.num_experts_per_tok,
                moe_router_pre_softmax=not shape.norm_topk_prob,
                moe_ffn_hidden_size=shape.moe_intermediate_size,
                moe_router_load_balancing_type="none",
                moe_router_dtype="fp32",
                moe_shared_expert_intermediate_size=shape.shared_expert_intermediate_size or None,
            )
        return config

    def hf_config(self, shape: ModelShape) -> dict[str, Any]:
        """The sizes as config.json has them, but for rope_theta, which transformers 5 keeps
        elsewhere than 4.
        """
        left_out = {"name", "model_type", "rope_theta"}
        if not self.experts:
            left_out |= {
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "norm_topk_prob",
            }
        if not self.shared_expert:
            left_out |= {"shared_expert_intermediate_size"}
        return {key: value for key, value in asdict(shape).items() if key not in left_out}

    def linears(self, shape: ModelShape) -> tuple[Linear, ...]:
        """The linear layers of one layer that LoRA knows."""
        h, d = shape.hidden_size, shape.head_dim
        q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
        width, f = (
            shape.intermediate_size + shape.shared_expert_intermediate_size,
            shape.moe_intermediate_size,
        )
        linears = [
            Linear("linear_qkv", h, q + 2 * kv, "column"),
            Linear("linear_proj", q, h, "row"),
        ]
        if width:
            linears += [
                Linear("linear_fc1", h, 2 * width, "column"),
                Linear("linear_fc2", width, h, "row"),
            ]
        if self.experts:
            copies = shape.num_experts, shape.num_experts_per_tok
            linears += [
                Linear("linear_fc1", h, 2 * f, "expert", *copies),
                Linear("linear_fc2", f, h, "expert", *copies),
            ]
        return tuple(linears)

    def other_parameters(self, shape: ModelShape, tp: int) -> int:
        """Parameters of one layer on one of `tp` ranks that are in none of `linears`: norms,
        biases, router, the shared expert's gate.
        """
        h, d = shape.hidden_size, shape.head_dim
        biases = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * d // tp
        return (
            2 * h
            + (biases if self.qkv_bias else 0)
            + (2 * d if self.qk_norm else 0)
            + h * shape.num_experts
            + (h if shape.shared_expert_intermediate_size else 0)
        )
