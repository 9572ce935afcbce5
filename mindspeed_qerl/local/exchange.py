"""All-to-all and all-gather through memory that the ranks of one machine share, in the place of gloo's, for experts' tokens.

gloo sends an all-to-all of n ranks as n (n - 1) messages over TCP and passes an all-gather around a ring. With more ranks than cores the time goes
into waking threads (benchmarks/exchange.py). Here a rank writes its part into memory that all have mapped, tells the first rank, and reads the
others' parts when that one says that all are there.
"""

import mmap
import os
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
        length = self.size * (PAGE + 2 * ROOM)
        file = [None]
        if self.rank == 0:
            descriptor = os.memfd_create("exchange")  # no name in any directory: it goes with the last process that has mapped it
            os.truncate(descriptor, length)
            file[0] = f"/proc/{os.getpid()}/fd/{descriptor}"
        dist.broadcast_object_list(file, group=group, group_src=0)
        with open(file[0], "r+b") as mapped:
            memory = np.frombuffer(mmap.mmap(mapped.fileno(), length), dtype=np.uint8)
        self.ends = memory[: PAGE * self.size].view(np.int64).reshape(self.size, 2, -1)[:, :, : self.size + 1]
        self.slots = torch.from_numpy(memory[PAGE * self.size :]).view(self.size, 2, ROOM)
        self.inbox, own = os.pipe()
        pipes = [None] * self.size
        dist.all_gather_object(pipes, f"/proc/{os.getpid()}/fd/{own}", group=group)
        self.outboxes = [os.open(pipe, os.O_WRONLY) for pipe in (pipes[1:] if self.rank == 0 else pipes[:1])]
        dist.barrier(group)
        os.close(own)
        if self.rank == 0:
            os.close(descriptor)

    def swap(self, part: torch.Tensor, ends: Sequence[int]) -> list[tuple[torch.Tensor, list[int]]] | None:
        """Show `part` (bytes) and `ends` (size + 1 numbers, the last one len(part)) to all ranks; returns those of all ranks in their order, to
        be read before the next call, or None if the part of one of them has no room."""
        half = self.turn = 1 - self.turn
        if len(part) <= ROOM:
            self.slots[self.rank, half, : len(part)].copy_(part)
        self.ends[self.rank, half] = ends
        self._wait_for_all()
        ends = self.ends[:, half].tolist()
        if any(of_rank[-1] > ROOM for of_rank in ends):
            return None
        return [(self.slots[rank, half, : of_rank[-1]], of_rank) for rank, of_rank in enumerate(ends)]

    def _wait_for_all(self) -> None:
        """Returns when all ranks have called it; what one wrote before, all see after."""
        if self.rank == 0:
            self._receive(self.size - 1)
        for outbox in self.outboxes:
            os.write(outbox, b"!")
        if self.rank:
            self._receive(1)

    def _receive(self, missing: int) -> None:
        while missing:
            received = os.read(self.inbox, missing)
            if not received:  # nobody is left who could write
                raise RuntimeError("the first rank of this process group has ended" if self.rank else "all other ranks of this group have ended")
            missing -= len(received)


_mailboxes: dict[dist.ProcessGroup, Exchange] = {}
_gloo_all_to_all, _gloo_all_gather = dist.all_to_all_single, dist.all_gather_into_tensor


def install() -> None:
    """Let torch.distributed.all_to_all_single and megatron-core's all-gather go this way, in this process."""
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
