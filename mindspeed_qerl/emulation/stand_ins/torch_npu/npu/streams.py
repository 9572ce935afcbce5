"""Names that vllm-ascend imports (utils.py:32)."""

from mindspeed_qerl.emulation.facade import Event, Stream  # noqa: F401
