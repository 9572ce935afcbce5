"""The model runner, whose initialize_kv_cache MindSpeed-RL replaces (vllm_adapter/engine_core.py)."""

from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class NPUModelRunner(CPUModelRunner):
    use_sparse = False  # read by MindSpeed-RL's replacement
