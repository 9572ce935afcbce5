"""A CPU as one of verl's platforms (VERL_USE_EXTERNAL_MODULES, VERL_PLATFORM=cpu), in each of its
processes; what a CPU has not does nothing.
"""

import sys

import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import import_utils


def nothing(*args, **kwargs):
    return 0


class NoDevice:
    """In the place of torch.cuda."""

    def __getattr__(self, name):
        return nothing

    def get_device_name(self, *args):
        return "cpu"

    def mem_get_info(self, *args):
        return 8 << 30, 16 << 30


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    device_name = vendor_name = "cpu"
    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = nothing

    @property
    def device_module(self):
        return NoDevice()

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def is_ipc_supported(self):
        return False


init_process_group = dist.init_process_group


def init_one_backend(backend=None, *args, **kwargs):
    """verl asks for "cpu:gloo,DEVICE:BACKEND", which are one here."""
    if backend == "cpu:gloo,cpu:gloo":
        backend = "gloo"
    return init_process_group(backend, *args, **kwargs)


dist.init_process_group = init_one_backend
import_utils.is_trl_available = lambda: False  # verl 0.9.1 asks TRL for a class that 1.16 lacks
if "vllm" in sys.modules:
    from mindspeed_qerl.integrations.cpu import keep_weights

    keep_weights()
