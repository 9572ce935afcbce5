"""The local engine: megatron-core trains, vLLM samples, Ray holds the processes. One machine, no
NPU.
"""
