"""Stands for vllm-ascend: makes vLLM's CPU platform behave like the NPU platform where MindSpeed-RL depends on the
difference.

vLLM finds it as it finds the real one, by the entry point in vllm_ascend-0.11.0.dist-info (VA setup.py:393). What
differs from vLLM on a CPU: the class of the norms, the layout of expert weights, expert parallelism over data parallel
ranks, linear weights that stay as they were loaded, the executor "external_launcher", no chunked prefill, gloo without
shared memory. Attention, rotary embedding, activation, sampling and the scheduler are vLLM's own for CPUs. `VA` in
comments is vllm-ascend's source.
"""


def register() -> str:
    """The platform's class, for vLLM."""
    return "vllm_ascend.platform.NPUPlatform"
