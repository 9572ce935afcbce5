"""vLLM's platform: a CPU that is configured like an NPU."""

import os

from vllm.platforms.cpu import CpuPlatform


class NPUPlatform(CpuPlatform):
    """The CPU platform with vllm-ascend's decisions (VA platform.py)."""

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        """Called once for every engine, before its workers and its model are made."""
        from vllm_ascend.utils import register_ascend_customop

        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        executor, local_world_size = parallel.distributed_executor_backend, os.environ.get("LOCAL_WORLD_SIZE")
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm_ascend.worker.worker_v1.NPUWorker"
        super().check_and_update_config(vllm_config)
        parallel.distributed_executor_backend = executor  # the CPU platform would turn "external_launcher" into "mp"
        if local_world_size is not None:
            # overwritten as a hint to a library that is not used here
            os.environ["LOCAL_WORLD_SIZE"] = local_world_size

        # VA turns chunked prefill off for these models and makes room for the longest prompt (platform.py, "Non-MLA
        # LLMs").
        scheduler.chunked_prefill_enabled = scheduler.enable_chunked_prefill = False
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
        # As VA does: with this name vLLM does not split the tokens of a mixture of experts over the tensor parallel
        # ranks.
        os.environ["VLLM_ALL2ALL_BACKEND"] = "flashinfer_all2allv"
        register_ascend_customop()

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "vllm_ascend.distributed.communicator.NPUCommunicator"
