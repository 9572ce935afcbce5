"""GRPO + LoRA + AQN for Megatron models: a MindSpeed-RL extension, and an engine that runs the same
recipe without an NPU.
"""

__version__ = "0.1.0"
