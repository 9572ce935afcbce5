"""How the ranks of a group talk: gloo."""

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class NPUCommunicator(CpuCommunicator):
    """vLLM's communicator without its shared memory, whose name holds the launcher's address to be unique.

    Under an external launcher that address is "env://" in every run: two runs on one machine would write into the same
    memory.
    """

    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""):
        # Only a name that begins with tp or pp gets shared memory.
        super().__init__(cpu_group, device, device_group, f"gloo:{unique_name}")
