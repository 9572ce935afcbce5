"""How the ranks of a run are divided: the Recipe's part `Layout`."""

import math

from .fields import LayerList, Size, key, part

MAX_RANKS = 100_000  # more are a typing error, and take gigabytes


@part()
class Layout:
    """Describes how `world` ranks are divided. Training: TP x PP x DP, experts over TP x EP
    (upstream's moe_tp_extend_ep). Rollout: vLLM instances of infer TP x EP ranks. num_layer_list:
    layers of each stage, () for equal ones.
    """

    world: int = key("rl_config.actor_resource.num_npus", 1, required=True, ge=1, le=MAX_RANKS)
    tp: Size = key("megatron.tensor_model_parallel_size", 1)
    pp: Size = key("megatron.pipeline_model_parallel_size", 1)
    ep: Size = key("megatron.expert_model_parallel_size", 1)
    infer_tp: Size = key("generate_config.infer_tensor_parallel_size", 1)
    infer_ep: Size = key("generate_config.infer_expert_parallel_size", 1)
    ranks_per_node: Size = key("npu.ranks_per_node", 16)  # upstream asks acl
    num_layer_list: LayerList = key("megatron.num_layer_list", ())
    sequence_parallel: bool = key("megatron.sequence_parallel", False)

    @property
    def dp(self) -> int:
        """Data-parallel ranks of training, as upstream counts them (validate_config.py: num_npus //
        (tp pp)).
        """
        return self.world // (self.tp * self.pp)

    @property
    def expert_ranks(self) -> int:
        """Ranks of training that share the experts of a layer."""
        return self.tp * self.ep

    @property
    def infer_expert_ranks(self) -> int:
        """Ranks of vLLM that share the experts of a layer."""
        return self.infer_tp * self.infer_ep

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts of the same layers (Megatron parallel_state.py:699)."""
        return self.world // (self.expert_ranks * self.pp)

    @property
    def infer_dp(self) -> int:
        """vLLM replicas, as upstream counts them: expert parallel ranks serve their own prompts."""
        return self.world // self.infer_tp

    @property
    def node_width(self) -> int:
        """Ranks a node, as upstream counts them (launcher.py:73): no more than there are in all."""
        return min(self.ranks_per_node, self.world)

    @property
    def nodes(self) -> int:
        return math.ceil(self.world / self.node_width)
