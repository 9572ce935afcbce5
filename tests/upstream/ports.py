"""Starts upstream's ZMQ server and client as two ranks do; test_ports.py reads what it prints."""

import json
import os
import queue
import socket
import threading

import ray
import torch
import zmq
from mindspeed_rl.utils.zmq_communication import ZmqClient, ZmqClientInfo, ZmqServerInfo

from mindspeed_qerl.ascend.ports import BoundZmqServer, install_address


def server_info(ports):
    info = ZmqServerInfo()
    info.global_rank, info.dp_world_size, info.ip_addr = 0, 2, "127.0.0.1"
    info.register_port, info.publisher_port, info.reliability_port = ports
    return info


def start_pair(ports):
    """A server that sends one tensor to its client; what arrives. The addresses go through a queue
    instead of torch.distributed.
    """
    addresses = queue.Queue()

    class Server(BoundZmqServer):
        def broadcast_server_info(self):
            addresses.put(vars(self.server_info))

    class Client(ZmqClient):
        def wait_server_broadcast(self):
            self.server_info = addresses.get(timeout=60)

    sent = {"answers": torch.arange(5)}
    serving = threading.Thread(
        target=lambda: Server(server_info(ports), None).dispatch_transfer_docker_data(sent),
        daemon=True,
    )
    serving.start()
    client_info = ZmqClientInfo()
    client_info.global_rank = 1
    arrived = Client(client_info, None).wait_publisher_message()
    serving.join(60)
    return arrived["answers"].tolist()


def drawn_ports():
    """As upstream's `_get_free_port` draws them."""
    ports = []
    for _ in range(3):
        with socket.socket() as drawn:
            drawn.bind(("127.0.0.1", 0))
            ports.append(drawn.getsockname()[1])
    return ports


ports = drawn_ports()
with socket.socket() as taken:  # by another process, since upstream drew them
    taken.bind(("127.0.0.1", ports[1]))
    arrived = start_pair(ports)
elsewhere = server_info(drawn_ports())
elsewhere.ip_addr = "203.0.113.1"
try:
    BoundZmqServer(elsewhere, None)
    refused = ""
except zmq.ZMQError as error:
    refused = str(error)
interfaces = []
for address, variable in (("203.0.113.1", ""), ("127.0.0.1", ""), ("127.0.0.1", "eth7")):
    os.environ.update({"GLOO_SOCKET_IFNAME": variable} if variable else {})
    ray.util.get_node_ip_address = lambda address=address: address
    install_address()
    interfaces.append(os.environ.pop("GLOO_SOCKET_IFNAME", None))
print("RESULT", json.dumps([arrived, refused, interfaces]))
