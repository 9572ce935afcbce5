"""The worker: one process of an external launcher."""

from vllm.v1.worker import cpu_worker

from vllm_ascend.worker.model_runner_v1 import NPUModelRunner


class NPUWorker(cpu_worker.CPUWorker):
    def init_device(self) -> None:
        cpu_worker.CPUModelRunner = NPUModelRunner  # CPUWorker makes the runner by this name
        super().init_device()

    def _get_autobind_cpu_ids(self, cpu_selector) -> str:
        """Threads stay unbound: several ranks share the cores, and vLLM wants a NUMA node for each."""
        return "all"
