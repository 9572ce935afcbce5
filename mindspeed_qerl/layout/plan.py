"""A plan: model shape, parallel layout and batch arithmetic of one run, as upstream's config states them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families import ModelShape, read_shape, shape_of_arguments
from mindspeed_qerl.recipe.config import Reader

MAX_RANKS = 100_000  # more are a slip of the keys, and take minutes to judge
DISPATCH = ("actor_rollout", "actor_logprob", "ref", "reward", "adv", "actor_update")  # rl_config.{name}_dispatch_size


@dataclass(frozen=True)
class Layout:
    """How `world` ranks are divided. Training: TP x PP x CP x DP, experts over TP x EP (upstream's moe_tp_extend_ep). Rollout: vLLM
    instances of infer TP x EP ranks."""

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    infer_tp: int = 1
    infer_pp: int = 1
    infer_ep: int = 1
    ranks_per_node: int = 16
    num_layer_list: tuple[int, ...] = ()  # layers of each pipeline stage; () = equal
    layers_per_virtual_stage: int | None = None  # None = no virtual pipeline
    cp_algorithm: str = "ulysses_cp_algo"
    sequence_parallel: bool = False
    tp_extend_ep: bool = True
    enable_expert_parallel: bool = True  # vLLM's

    @property
    def dp(self) -> int:
        """Data-parallel ranks of training, as upstream counts them (validate_config.py: num_npus // (tp pp cp))."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts of the same layers (Megatron parallel_state.py:699)."""
        return self.world // (self.tp * self.ep * self.pp)

    @property
    def infer_dp(self) -> int:
        """Rollout replicas of the prompts, as upstream counts them: world // infer TP; expert parallel ranks serve their own prompts."""
        return self.world // (self.infer_tp * self.infer_pp)

    @property
    def node_width(self) -> int:
        """Ranks a node, as upstream counts them (launcher.py:73): no more than there are in all."""
        return min(self.ranks_per_node, self.world)

    @property
    def nodes(self) -> int:
        return ceil(self.world / self.node_width)


@dataclass(frozen=True)
class Batch:
    """Batch arithmetic. Sizes count prompts, except `micro_batch_size` and the dispatch sizes, which count answers (None = upstream's default)."""

    global_batch_size: int = 64
    mini_batch_size: int = 64
    samples_per_prompt: int = 8
    micro_batch_size: int = 1
    forward_micro_batch_size: int | None = None  # of the passes that compute log-probabilities; None = micro_batch_size
    dispatch: Mapping[str, int | None] = field(default_factory=dict)  # actor_rollout_dispatch_size and so on
    guarantee_order: bool = True
    seq_length: int = 2560
    max_model_len: int = 2560
    max_num_batched_tokens: int = 8192
    use_remove_padding: bool = False
    reset_attention_mask: bool = False
    no_pad_to_seq_lengths: bool = True

    @property
    def answers(self) -> int:
        """Answers of one iteration."""
        return self.global_batch_size * self.samples_per_prompt

    @property
    def mini_answers(self) -> int:
        """Answers of one update (upstream multiplies mini_batch_size, rl_config.py:256)."""
        return self.mini_batch_size * self.samples_per_prompt


@dataclass(frozen=True)
class Plan:
    """Everything the rules look at."""

    shape: ModelShape
    layout: Layout
    batch: Batch = Batch()
    lora: bool = True
    share_backbone: bool = True
    padded_vocab_size: int | None = None  # rows of Megatron's embedding; None = vLLM's

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return self.layout.num_layer_list or (self.shape.num_hidden_layers // self.layout.pp,) * self.layout.pp


def arguments_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments as upstream puts them together: the named model's, overridden by the sections (base_config.py:14)."""
    training = {**(raw.get("megatron_training") or {}), **(raw.get("actor_config") or {})}
    models = raw.get("model") or {}
    model = models.get(training.get("model")) if isinstance(models, Mapping) else None
    return {**(model or {}), **training}


def shape_of_config(raw: Mapping[str, Any]) -> ModelShape:
    """The shape that Megatron is told; ConfigError as for `shape_of_arguments`."""
    return shape_of_arguments(arguments_of(raw))


def shape_of_model(raw: Mapping[str, Any]) -> ModelShape:
    """The shape in the model's own config.json, which vLLM goes by; while the model is not there, what Megatron is told."""
    directory = Path(str(arguments_of(raw).get("tokenizer_name_or_path")))
    return read_shape(directory) if (directory / "config.json").is_file() else shape_of_config(raw)


def layer_list(value: Any, reader: Reader) -> tuple[int, ...]:
    """num_layer_list, "14,14", as numbers; () for none; a fault for anything else."""
    parts = str(value or "").split(",") if value else []
    if all(part.strip().isdecimal() for part in parts):
        return tuple(map(int, parts))
    reader.fault(f"num_layer_list = {value!r} must be whole numbers with commas between them, such as 14,14")
    return ()


def read_plan(raw: Mapping[str, Any], shape: ModelShape, ranks_per_node: int = 16) -> Plan:
    """The plan that a resolved config states; upstream's defaults where it is silent.

    Args:
        raw: the sections as plain dicts.
        shape: of the model that vLLM will load (`read_shape` of its directory, or `shape_of_config`).
        ranks_per_node: a config does not say how many NPUs a node has; upstream asks acl.

    Raises:
        ConfigError: a value that is no number where one is needed, or is missing where upstream has no default.
    """
    arguments, reader = arguments_of(raw), Reader(raw)
    actor, training = raw.get("actor_config") or {}, raw.get("megatron_training") or {}
    resource = (raw.get("rl_config") or {}).get("actor_resource") or {}
    if not isinstance(resource, Mapping):
        raise ConfigError(f"rl_config.actor_resource = {resource!r} must be a mapping with num_npus")

    def megatron(key: str, default: Any = None, kind: type = int, low: int | None = 1) -> Any:
        value = arguments.get(key)
        section = "actor_config" if key in actor else "megatron_training" if key in training else "model"
        if value is None and default is None and kind is int:
            reader.fault(f"{key} is missing in actor_config and megatron_training")
        return default if value is None else reader.value(f"{section}.{key}", value, default or low, kind, low if kind is int else None, None)

    def rl(key: str, default: Any, kind: type = int, low: int | None = 1) -> Any:
        return reader.upstream("rl_config", key, default, (kind,), low=low if kind is int else None)

    def generate(key: str, default: Any, kind: type = int) -> Any:
        return reader.upstream("generate_config", key, default, (kind,), low=1 if kind is int else None)

    world = reader.value("rl_config.actor_resource.num_npus", resource.get("num_npus"), 1, int, 1, MAX_RANKS)
    virtual = arguments.get("num_layers_per_virtual_pipeline_stage")
    padded = arguments.get("padded_vocab_size")
    layout = Layout(
        world=world, ranks_per_node=ranks_per_node,
        **{name: megatron(f"{kind}_parallel_size", 1) for name, kind in
           (("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"), ("ep", "expert_model"))},
        infer_tp=generate("infer_tensor_parallel_size", 8), infer_pp=generate("infer_pipeline_parallel_size", 1),
        infer_ep=generate("infer_expert_parallel_size", 1),
        num_layer_list=layer_list(arguments.get("num_layer_list"), reader),
        layers_per_virtual_stage=None if virtual is None else megatron("num_layers_per_virtual_pipeline_stage", 1),
        cp_algorithm=megatron("context_parallel_algo", "ulysses_cp_algo", str),
        sequence_parallel=megatron("sequence_parallel", False, bool), tp_extend_ep=megatron("moe_tp_extend_ep", False, bool),
        enable_expert_parallel=generate("enable_expert_parallel", False, bool))
    micro = megatron("micro_batch_size")
    batch = Batch(
        global_batch_size=megatron("global_batch_size"), mini_batch_size=rl("mini_batch_size", 1),
        samples_per_prompt=rl("n_samples_per_prompt", 1), micro_batch_size=micro,
        forward_micro_batch_size=max(rl(f"{who}_forward_micro_batch_size", micro) for who in ("actor", "ref")),
        dispatch={f"{name}_dispatch_size": rl(f"{name}_dispatch_size", None) for name in DISPATCH},
        guarantee_order=rl("guarantee_order", False, bool), seq_length=megatron("seq_length"), max_model_len=generate("max_model_len", 2048),
        max_num_batched_tokens=generate("max_num_batched_tokens", 2048),
        use_remove_padding=rl("use_remove_padding", False, bool), reset_attention_mask=megatron("reset_attention_mask", False, bool),
        no_pad_to_seq_lengths=megatron("no_pad_to_seq_lengths", False, bool))
    plan = Plan(shape, layout, batch, lora=bool(arguments.get("lora_target_modules")), share_backbone=rl("share_backbone", False, bool),
                padded_vocab_size=None if padded is None else megatron("padded_vocab_size", 1))
    if reader.faults:
        raise ConfigError("\n".join(dict.fromkeys(reader.faults)))
    return plan
