"""vllm-ascend's worker asks for them (worker/worker_v1.py:85); here they are there from the start."""


def _register_atb_extensions() -> None:
    pass
