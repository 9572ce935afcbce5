"""Upstream's addresses: of the nodes, and its ZMQ server on ports that nobody can take from it.

A rank that shares its answers with its tensor and pipeline parallel peers draws three ports, closes
each, and binds them again later (MindSpeed-RL workers/base_worker.py:117 `_get_free_port`,
utils/zmq_communication.py `init_socket`). What another process took in between is an error that is
logged and passed over; the run ends in `'NoneType' object has no attribute 'recv_json'` or, a
minute later, in `wait client pubsub message ack overtime`. Here each socket binds to port 0 and
tells the port that it got: the server's addresses are broadcast afterwards.
"""

import os

import ray
import zmq
from mindspeed_rl.utils import utils
from mindspeed_rl.utils.zmq_communication import ZmqServer
from mindspeed_rl.workers import actor_hybrid_worker, base_worker

from .cluster import interface_of


class BoundZmqServer(ZmqServer):
    """A server of upstream's that says why it cannot bind, and gives a slow peer `seconds` before
    the run is given up.
    """

    seconds = 60  # that a peer may take; upstream's, in which a slow one ends the run

    def init_socket(self) -> None:
        """The three sockets, their ports in `server_info`. zmq.ZMQError: the address cannot be
        bound.
        """
        self.msg_overtime_seconds = self.seconds
        self.publisher, self.server_info.publisher_port = self._bound(zmq.PUB)
        self.register, self.server_info.register_port = self._bound(zmq.REP)
        self.reliability, self.server_info.reliability_port = self._bound(zmq.PULL)

    def _bound(self, kind: int) -> tuple[zmq.Socket, int]:
        """A socket, and the port that the system gave it."""
        bound = self.context.socket(kind)
        return bound, bound.bind_to_random_port(f"tcp://{self.server_info.ip_addr}")


def install(seconds: int) -> None:
    """Put the server where upstream's workers of this process look theirs up."""
    BoundZmqServer.seconds = seconds
    base_worker.ZmqServer = actor_hybrid_worker.ZmqServer = BoundZmqServer


def install_address() -> None:
    """Let upstream take this node's address from Ray, which has NODE_ADDR of the launcher (`ray
    start --node-ip-address`), in the constructor of a worker, which takes it for MASTER_ADDR
    (base_worker.py:94,119); and gloo the interface with that address, if GLOO_SOCKET_IFNAME is not
    set.

    Upstream's own is that of the interface that routes to 8.8.8.8 (utils.py:679), which may be
    another network than the one that the nodes share; without a route, what `ifconfig` or the
    host's name says. Gloo's own is that of the host's name: 127.0.1.1 on a Debian, where one rank
    is refused at once and the others wait for it.
    """
    base_worker.get_current_node_ip = utils.get_current_node_ip = ray.util.get_node_ip_address
    if interface := interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
