"""A Ray of one run's own on this machine, that nobody else can reach."""

import os
from typing import Any


def start(**options: Any) -> None:
    """`ray.init` of a new Ray that listens on the loopback interface only; `options` are its other arguments.

    Ray takes 127.0.0.1 for the host's public address and listens on every interface, unless it is told not to be a cluster, which it
    asks when it is imported (ray/_private/services.py:resolve_ip_for_localhost, ray_constants.py:ENABLE_RAY_CLUSTER).
    """
    import ray
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options)
