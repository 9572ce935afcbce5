"""All-to-all and all-gather through memory that the ranks of one machine share, in the place of gloo's, for experts' tokens.

gloo sends an all-to-all of n ranks as n (n - 1) messages over TCP and passes an all-gather around a ring. With more ranks than cores the time goes
into waking threads (benchmarks/exchange.py). Here a rank writes its part into a file that all have mapped, and reads the others' when they have
written theirs; whoever waits lets others run.
"""

import mmap
import os
import platform
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

PAGE = mmap.PAGESIZE
ROOM = 1 << 20  # bytes for one rank's part; gloo carries what is larger


class Exchange:
    """The mailbox of one process group, made by all its ranks together.

    Every rank has two slots, used in turn: a slot is written again only after all ranks have begun the next exchange, so after they have read it.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size, self.turn = dist.get_rank(group), dist.get_world_size(group), 0
        length = PAGE * (1 + self.size) + 2 * self.size * ROOM
        file = [None]
        if self.rank == 0:
            descriptor = os.memfd_create("exchange")  # no name in any directory: it goes with the last process that has mapped it
            os.truncate(descriptor, length)
            file[0] = f"/proc/{os.getpid()}/fd/{descriptor}"
        dist.broadcast_object_list(file, group=group, group_src=0)
        with open(file[0], "r+b") as mapped:
            memory = np.frombuffer(mmap.mmap(mapped.fileno(), length), dtype=np.uint8)
        dist.barrier(group)
        if self.rank == 0:
            os.close(descriptor)
        self.begun = memory[: self.size * 8].view(np.int64)
        self.ends = memory[PAGE : PAGE * (1 + self.size)].view(np.int64).reshape(self.size, 2, -1)[:, :, : self.size + 1]
        self.slots = torch.from_numpy(memory[PAGE * (1 + self.size) :]).view(self.size, 2, ROOM)

    def swap(self, part: torch.Tensor, ends: Sequence[int]) -> list[tuple[torch.Tensor, list[int]]] | None:
        """Show `part` (bytes) and `ends` (size + 1 numbers, the last one len(part)) to all ranks; returns those of all ranks in their order, to
        be read before the next call, or None if the part of one of them has no room."""
        turn = self.turn = self.turn + 1
        half = turn % 2
        if len(part) <= ROOM:
            self.slots[self.rank, half, : len(part)].copy_(part)
        self.ends[self.rank, half] = ends
        self.begun[self.rank] = turn
        while self.begun.min() < turn:
            os.sched_yield()
        ends = self.ends[:, half].tolist()
        if any(of_rank[-1] > ROOM for of_rank in ends):
            return None
        return [(self.slots[rank, half, : of_rank[-1]], of_rank) for rank, of_rank in enumerate(ends)]


_mailboxes: dict[dist.ProcessGroup, Exchange] = {}
_gloo_all_to_all, _gloo_all_gather = dist.all_to_all_single, dist.all_gather_into_tensor


def install() -> None:
    """Let torch.distributed.all_to_all_single and megatron-core's all-gather go this way, in this process."""
    if platform.machine() == "x86_64":  # others may show a rank's turn before what it wrote
        from megatron.core.tensor_parallel import mappings

        dist.all_to_all_single, mappings.dist_all_gather_func = all_to_all_single, all_gather_into_tensor


def all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int] | None = None,
                      input_split_sizes: Sequence[int] | None = None, group: dist.ProcessGroup | None = None) -> None:
    """torch.distributed's, for tensors on the CPU; synchronous."""
    mailbox, part = _mailbox(group), _bytes(input.contiguous())
    rows = [len(input) // mailbox.size] * mailbox.size if input_split_sizes is None else input_split_sizes
    ends = [0, *(np.cumsum(rows) * (len(part) // max(1, len(input)))).tolist()]
    if parts := mailbox.swap(part, ends):
        torch.cat([memory[at[mailbox.rank] : at[mailbox.rank + 1]] for memory, at in parts], out=_bytes(output))
    else:
        _gloo_all_to_all(output, input, output_split_sizes, input_split_sizes, group)


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """torch.distributed's, for tensors on the CPU; synchronous."""
    mailbox, part = _mailbox(group), _bytes(input.contiguous())
    if parts := mailbox.swap(part, [0] * mailbox.size + [len(part)]):
        torch.cat([memory for memory, _ in parts], out=_bytes(output))
    else:
        _gloo_all_gather(output, input, group=group)


def _mailbox(group: dist.ProcessGroup | None) -> Exchange:
    if group not in _mailboxes:
        _mailboxes[group] = Exchange(group)
    return _mailboxes[group]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
