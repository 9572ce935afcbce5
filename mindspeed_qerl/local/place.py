"""Where a rank stands among the others: its device, and Megatron's groups around it."""

import os

import torch
import torch.distributed as dist

from mindspeed_qerl.families.tensors import Split
from mindspeed_qerl.recipe.types import Layout


class Place:
    """A rank's device and groups: meets the other ranks, and sets up torch.distributed and
    Megatron's parallel state in this process.

    Args:
        rendezvous: init_method, for example file:///some/new/file.

    Attributes:
        sizes: of Megatron's groups, by its names. expert_data_group: ranks that hold the same
            experts.
    """

    def __init__(self, layout: Layout, moe: bool, rank: int, rendezvous: str):
        os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", GLOO_SOCKET_IFNAME="lo")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = accelerator or torch.device("cpu")
        if self.device.type == "cpu":
            from mindspeed_qerl.emulation import cuda_on_cpu

            cuda_on_cpu.install()
        else:
            torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        from megatron.core import parallel_state

        backend = dist.get_default_backend_for_device(self.device)  # gloo, nccl; torch_npu: hccl
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=layout.world)
        self.sizes = dict(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.expert_ranks if moe else 1,
            expert_tensor_parallel_size=1,
        )
        parallel_state.initialize_model_parallel(**self.sizes)
        self.tp_size = layout.tp
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        self.data_group = parallel_state.get_data_parallel_group()
        self.expert_data_group = parallel_state.get_expert_data_parallel_group()

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Returns True if this rank's copy of `parameter` stands for those of the data-parallel
        ranks that hold the same.
        """
        group = self.data_group if parameter.allreduce else self.expert_data_group
        return group.rank() == 0

    def whole(self, shard: torch.Tensor, split: Split | None) -> torch.Tensor | None:
        """The whole tensor on the first rank of the tensor parallel group, None on the others, if
        they share it (`split`).
        """
        if split is None or self.tp_size == 1:
            return shard
        shard = shard.contiguous()
        shards = None
        if self.tp_rank == 0:
            shards = [torch.empty_like(shard) for _ in range(self.tp_size)]
        dist.gather(shard, shards, group=self.tp_group, group_dst=0)
        return split.join(shards) if shards else None
