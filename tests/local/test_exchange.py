"""The exchange through shared memory gives what gloo gives."""

import pytest
import torch
import torch.distributed as dist

from mindspeed_qerl.local import exchange

from .conftest import run_ranks

RANKS = 4
SPLITS = [[3, 0, 5, 1], [0, 0, 0, 2], [4, 4, 4, 4], [0, 0, 0, 0]]  # rows from each rank to each


def rank_of(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    some = dist.new_group([1, 3])
    for dtype, width in ((torch.float32, (3,)), (torch.bfloat16, (2, 4)), (torch.int64, ()), (torch.bool, (1,))):
        for turn in range(3):
            rows = SPLITS[(rank + turn) % RANKS]
            theirs = [SPLITS[(other + turn) % RANKS][rank] for other in range(RANKS)]
            sent = torch.randint(0, 100, (sum(rows), *width)).to(dtype)
            ours, gloos = (torch.zeros(sum(theirs), *width, dtype=dtype) for _ in range(2))
            exchange.all_to_all_single(ours, sent, theirs, rows, dist.group.WORLD)
            exchange._gloo_all_to_all(gloos, sent, theirs, rows, dist.group.WORLD)
            assert torch.equal(ours, gloos)
    even = torch.arange(8.0) + 100 * rank
    ours, gloos = torch.zeros(8), torch.zeros(8)
    exchange.all_to_all_single(ours, even, group=dist.group.WORLD)
    exchange._gloo_all_to_all(gloos, even, group=dist.group.WORLD)
    assert torch.equal(ours, gloos)
    if rank in (1, 3):
        for length in (1, exchange.ROOM // 4, exchange.ROOM // 4 + 1):  # the last one has no room, on any rank
            part = torch.randn(length)
            ours, gloos = torch.zeros(2 * length), torch.zeros(2 * length)
            exchange.all_gather_into_tensor(ours, part, group=some)
            exchange._gloo_all_gather(gloos, part, group=some)
            assert torch.equal(ours, gloos)
    mailbox = exchange._mailbox(dist.group.WORLD)
    ends = [0] * RANKS + [8]
    shown = mailbox.swap(torch.full((8,), rank, dtype=torch.uint8), ends)
    if rank == 0:  # writes its next part while the others have not read this one
        wait_for_all, mailbox._wait_for_all = mailbox._wait_for_all, lambda: (dist.barrier(), wait_for_all())
        mailbox.swap(torch.full((8,), 99, dtype=torch.uint8), ends)
        mailbox._wait_for_all = wait_for_all
    else:
        dist.barrier()
        assert [part.tolist() for part, _ in shown] == [[other] * 8 for other in range(RANKS)]
        mailbox.swap(torch.full((8,), 99, dtype=torch.uint8), ends)
    rows = [exchange.ROOM // 4 + 1 if rank == 2 else 1, 0, 0, 0]  # one rank's part has no room: all of them take the other way
    theirs = [exchange.ROOM // 4 + 1 if other == 2 else 1 for other in range(RANKS)] if rank == 0 else [0] * RANKS
    sent, ours = torch.full((sum(rows),), float(rank)), torch.zeros(sum(theirs))
    exchange.all_to_all_single(ours, sent, theirs, rows, dist.group.WORLD)
    if rank == 0:
        assert torch.equal(ours, torch.cat([torch.full((count,), float(other)) for other, count in enumerate(theirs)]))


@pytest.mark.filterwarnings("ignore")
def test_what_arrives_is_what_gloo_brings(tmp_path):
    run_ranks(rank_of, RANKS, str(tmp_path / "rendezvous"))
