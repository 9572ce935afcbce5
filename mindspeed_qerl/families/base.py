"""What a model family is: its sizes, what Megatron and transformers are told of them, its linear layers. Sizes only:
no torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_qerl.routing.routes import Routers

LARGEST = 10 ** 9  # of any one size
# config.json key -> the values that every family here has; another one is a model with other layers or other tensors
ALIKE = {"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1), "quantization_config": (None, {})}
# the same for what changes no size: planned, but neither engine computes it
BUILT = {"hidden_act": (None, "silu"), "use_sliding_window": (None, False), "attention_bias": (None, False),
         "mlp_bias": (None, False), "qkv_bias": (None, True)}


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, by the keys of a Hugging Face config.json. `intermediate_size` is the width of a dense MLP, 0
    if every layer has experts; the expert fields are 0 in a dense model."""

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

        return Routers(tuple(range(self.num_hidden_layers if self.moe else 0)), self.num_experts,
                       self.num_experts_per_tok)


@dataclass(frozen=True)
class Linear:
    """A linear layer of one transformer layer.

    Attributes:
        target: Megatron's name for it, which is a LoRA target; gate and up are one, and so are q, k and v.
        inputs, outputs: of the whole layer.
        split: what tensor parallel ranks share: "column" (outputs), "row" (inputs), or "expert": whole ones are dealt
            to ranks.
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
    """How MindSpeed-LLM converts a family's weights: the script, its name for the family, and what the family needs
    besides."""

    script: str
    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Adaptor:
    """What of MindSpeed-RL's weight adaptors (workers/resharding/weight_adaptor.py) syncs a family: a class there,
    pairs (Megatron's part of a name, vLLM's) before its own params_mapping, and corrections (wrong, right) of the
    Megatron names that it makes of vLLM's."""

    base: str
    params_mapping: tuple[tuple[str, str], ...] = ()
    corrections: tuple[tuple[str, str], ...] = ()


class Keys:
    """Values read key by key; each that is missing or impossible becomes a line of `faults`, and a possible one takes
    its place.

    Args:
        place: words behind the value, such as " in config.json". missing: what to say of None; None: as of any value.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "", missing: str | None = None):
        self.values, self.place, self.missing = values, place, missing
        self.faults: list[str] = []

    def fault(self, key: str, value: Any, rule: str) -> None:
        unsaid = value is None and self.missing
        self.faults.append(f"{key} {self.missing}" if unsaid else f"{key} = {value!r}{self.place} must be {rule}")

    def size(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(key, default)
        if value is None and self.missing:
            value = default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST:
            return value
        self.fault(key, value, f"a whole number of at least {low} and at most {LARGEST:,}")
        return 1

    def number(self, key: str, value: Any, default: float) -> float:
        """`value`, found somewhere as `key`, or the default for None."""
        value = default if value is None else value
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30:
            return float(value)
        self.fault(key, value, "a finite number above 0")
        return default

    def truth(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.fault(key, value, "true or false")
        return value is True

    def check(self, name: str = "") -> None:
        """ConfigError with every fault, one a line."""
        if self.faults:
            raise ConfigError("\n".join(f"{name}: {fault}" if name else fault for fault in dict.fromkeys(self.faults)))


@dataclass(frozen=True)
class Family:
    """A model family: RMSNorm before attention and MLP, rotary positions, SwiGLU, and what the fields say.

    Attributes:
        model_type: of config.json. architecture: of transformers and vLLM.
        qk_norm: queries and keys are normalised. qkv_bias: their projections have biases.
        experts: every layer routes tokens to experts. shared_expert: and has one for all tokens, with a gate.
        own_head_dim: heads may be of any width, not hidden_size / num_attention_heads.
        named: shapes known by name, for planning without the model.
        conversion, adaptor: None if the NPU engine cannot run the family.
        megatron: arguments of Megatron that the family needs besides. extra_arguments: the same where MindSpeed-RL has
            no key for them.
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
        """The shape in the keys of a config.json of this family.

        Raises:
            ConfigError: a value is missing or impossible, or is of a model with other layers.
        """
        keys = Keys(config, " in config.json")
        for key, values in ALIKE.items():
            if config.get(key) not in values:
                keys.faults.append(f"{key} = {config[key]!r} in config.json is not modelled here: layouts and memory "
                                   "would be another model's")
        sizes = {key: keys.size(key)
                 for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}
        heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
        if self.experts:
            if config.get("num_experts") is None and "num_local_experts" in config:  # as transformers 5 writes it
                keys.values = {**config, "num_experts": config["num_local_experts"]}
            sizes |= {key: keys.size(key) for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
            if self.shared_expert:
                sizes["shared_expert_intermediate_size"] = keys.size("shared_expert_intermediate_size", 0, low=0)
            if sizes["num_experts_per_tok"] > sizes["num_experts"]:
                keys.fault("num_experts_per_tok", sizes["num_experts_per_tok"],
                           f"at most num_experts = {sizes['num_experts']}")
        if config.get("head_dim") is None:
            sizes["head_dim"] = hidden // heads
            if hidden < heads and not keys.faults:
                keys.fault("head_dim", 0, "a whole number of at least 1: hidden_size / num_attention_heads, unless "
                                          "config.json says it")
        else:
            sizes["head_dim"] = keys.size("head_dim")
        shape = ModelShape(
            name=name, model_type=self.model_type, **sizes,
            intermediate_size=0 if self.experts else keys.size("intermediate_size"),
            num_key_value_heads=keys.size("num_key_value_heads", heads),
            rope_theta=keys.number("rope_theta", _rope(keys).get("rope_theta"), 10000.0),
            tie_word_embeddings=keys.truth("tie_word_embeddings"),
            max_position_embeddings=keys.size("max_position_embeddings", 32768),
            norm_topk_prob=self.experts and keys.truth("norm_topk_prob"),
            rms_norm_eps=keys.number("rms_norm_eps", config.get("rms_norm_eps"), 1e-6))
        keys.check(name)
        return shape

    def megatron_arguments(self, shape: ModelShape) -> dict[str, Any]:
        """Every argument that Megatron must be told of the model, in MindSpeed-RL's form: it builds another model with
        a default of its own."""
        groups, shared = shape.num_key_value_heads, shape.shared_expert_intermediate_size
        arguments = dict(
            use_mcore_models=True, num_layers=shape.num_hidden_layers, hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads, group_query_attention=True, num_query_groups=groups,
            kv_channels=shape.head_dim, add_qkv_bias=self.qkv_bias, qk_layernorm=self.qk_norm,
            disable_bias_linear=True, swiglu=True, normalization="RMSNorm", norm_epsilon=shape.rms_norm_eps,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
            untie_embeddings_and_output_weights=not shape.tie_word_embeddings, hidden_dropout=0.0,
            attention_dropout=0.0)
        if not self.experts:
            return arguments | dict(ffn_hidden_size=shape.intermediate_size, num_experts=None, **self.megatron)
        copies = shared / shape.moe_intermediate_size  # Megatron counts in widths of an expert
        return arguments | dict(
            num_experts=shape.num_experts, moe_router_topk=shape.num_experts_per_tok,
            moe_ffn_hidden_size=shape.moe_intermediate_size, norm_topk_prob=shape.norm_topk_prob,
            n_shared_experts=(int(copies) if copies.is_integer() else copies) or None,
            moe_router_load_balancing_type="aux_loss", **self.megatron)

    def transformer_config(self, shape: ModelShape) -> dict[str, Any]:
        """The fields of megatron-core's TransformerConfig that describe the model."""
        from torch.nn.functional import silu

        config = dict(
            num_layers=shape.num_hidden_layers, hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads, num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim, ffn_hidden_size=shape.intermediate_size or shape.moe_intermediate_size,
            gated_linear_unit=True, activation_func=silu, normalization="RMSNorm",
            layernorm_epsilon=shape.rms_norm_eps, qk_layernorm=self.qk_norm, add_bias_linear=False,
            add_qkv_bias=self.qkv_bias, hidden_dropout=0.0, attention_dropout=0.0)
        if self.experts:
            config |= dict(
                num_moe_experts=shape.num_experts, moe_router_topk=shape.num_experts_per_tok,
                moe_router_pre_softmax=not shape.norm_topk_prob, moe_ffn_hidden_size=shape.moe_intermediate_size,
                moe_router_load_balancing_type="none", moe_router_dtype="fp32",
                moe_shared_expert_intermediate_size=shape.shared_expert_intermediate_size or None)
        return config

    def hf_config(self, shape: ModelShape) -> dict[str, Any]:
        """The sizes as config.json has them, but for rope_theta, which transformers 5 keeps elsewhere than 4."""
        left_out = {"name", "model_type", "rope_theta"}
        if not self.experts:
            left_out |= {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
        if not self.shared_expert:
            left_out |= {"shared_expert_intermediate_size"}
        return {key: value for key, value in asdict(shape).items() if key not in left_out}

    def linears(self, shape: ModelShape) -> tuple[Linear, ...]:
        """The linear layers of one layer that LoRA knows."""
        h, d = shape.hidden_size, shape.head_dim
        q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
        width, f = shape.intermediate_size + shape.shared_expert_intermediate_size, shape.moe_intermediate_size
        linears = [Linear("linear_qkv", h, q + 2 * kv, "column"), Linear("linear_proj", q, h, "row")]
        if width:
            linears += [Linear("linear_fc1", h, 2 * width, "column"), Linear("linear_fc2", width, h, "row")]
        if self.experts:
            copies = shape.num_experts, shape.num_experts_per_tok
            linears += [Linear("linear_fc1", h, 2 * f, "expert", *copies),
                        Linear("linear_fc2", f, h, "expert", *copies)]
        return tuple(linears)

    def other_parameters(self, shape: ModelShape, tp: int) -> int:
        """Parameters of one layer on one of `tp` ranks that are in none of `linears`: norms, biases, router, the
        shared expert's gate."""
        h, d = shape.hidden_size, shape.head_dim
        biases = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * d // tp
        return (2 * h + (biases if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0) + h * shape.num_experts
                + (h if shape.shared_expert_intermediate_size else 0))


def _rope(keys: Keys) -> dict[str, Any]:
    """What config.json says of rotary positions: rope_parameters (transformers 5), rope_scaling, and rope_theta of its
    own, the last one first."""
    said: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = keys.values.get(key)
        if isinstance(rope, Mapping):
            said |= rope
        elif rope is not None:
            keys.fault(key, rope, "an object or null")
    theta = keys.values.get("rope_theta")
    return said if theta is None else {**said, "rope_theta": theta}


def not_built(config: Mapping[str, Any]) -> list[str]:
    """What a config.json asks for that neither engine computes: another activation, a sliding window, scaled rotary
    positions.

    >>> not_built({"hidden_act": "gelu", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    ["hidden_act is 'gelu'; only 'silu' is built", "rope_type is 'yarn'; only 'default' is built"]
    """
    faults = [f"{key} is {config[key]!r}; only {values[-1]!r} is built"
              for key, values in BUILT.items() if config.get(key) not in values]
    rope = _rope(Keys(config))
    kind = rope.get("rope_type", rope.get("type", "default"))  # transformers below 4.43 wrote the second
    return faults + ([f"rope_type is {kind!r}; only 'default' is built"] if kind != "default" else [])
