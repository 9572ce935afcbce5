"""Nothing is left to patch: see vllm_ascend/platform.py."""
