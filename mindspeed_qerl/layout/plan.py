"""A plan: model shape, parallel layout, batch arithmetic and memory settings of one run, as upstream's config states them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_qerl.layout.shapes import ModelShape


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
    sequence_parallel: bool = False
    tp_extend_ep: bool = True

    @property
    def dp(self) -> int:
        """Data-parallel ranks of training, as upstream counts them (validate_config.py: num_npus // (tp pp cp))."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def infer_dp(self) -> int:
        """Rollout replicas of the prompts, as upstream counts them: world // infer TP; expert parallel ranks serve their own prompts."""
        return self.world // (self.infer_tp * self.infer_pp)

    @property
    def nodes(self) -> int:
        return -(-self.world // self.ranks_per_node)


@dataclass(frozen=True)
class Batch:
    """Batch arithmetic. Sizes count prompts, except `micro_batch_size` and the dispatch sizes, which count answers (None = upstream's default)."""

    global_batch_size: int = 64
    mini_batch_size: int = 64
    samples_per_prompt: int = 8
    micro_batch_size: int = 1
    dispatch: Mapping[str, int | None] = field(default_factory=dict)  # actor_rollout_dispatch_size and so on
    seq_length: int = 2560
    max_model_len: int = 2560
    use_remove_padding: bool = False
    reset_attention_mask: bool = False
    no_pad_to_seq_lengths: bool = True


@dataclass(frozen=True)
class Plan:
    """Everything the rules look at."""

    shape: ModelShape
    layout: Layout
    batch: Batch = Batch()
    lora: bool = True


def read_plan(raw: Mapping[str, Any], shape: ModelShape) -> Plan:
    """The plan that a resolved config states; upstream's defaults where it is silent."""
    raise NotImplementedError
