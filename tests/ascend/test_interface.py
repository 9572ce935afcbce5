"""Gloo between two nodes whose host's name has no address that the other node reaches."""

import socket
import subprocess
import sys

import pytest

from tests.fake_box.network import ADDRESSES, UNREACHABLE, joined, why_no_cable

pytestmark = pytest.mark.skipif(bool(why_no_cable()), reason=why_no_cable())
# Rank 1 is the one that is refused, at once; rank 0 would wait for it.
RANK = f"""
import os, sys, torch
from mindspeed_qerl.ascend.cluster import interface_of
rank = int(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = interface_of({ADDRESSES}[rank])
torch.distributed.init_process_group("gloo", init_method="tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=2)
total = torch.tensor(rank + 1)
torch.distributed.all_reduce(total)
print(total.item())
"""
WITH_HOSTS = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'


@pytest.mark.parametrize(
    "address",
    [
        "127.0.1.1",
        pytest.param(UNREACHABLE, marks=pytest.mark.full),
        pytest.param("10.9.9.9", marks=pytest.mark.full),
    ],
)
def test_gloo_takes_the_interface_of_the_nodes_address(address, tmp_path):
    """Debian's own line, a bridge that both nodes have, another machine's address."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
    with joined() as cables:
        ranks = [
            subprocess.Popen(
                [
                    *cable,
                    "unshare",
                    "--mount",
                    "bash",
                    "-c",
                    WITH_HOSTS,
                    "bash",
                    hosts,
                    sys.executable,
                    "-c",
                    RANK,
                    str(rank),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, cable in enumerate(cables)
        ]
        try:
            assert ranks[1].communicate(timeout=60)[0] == "3\n"
            assert ranks[0].communicate(timeout=60)[0] == "3\n"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
