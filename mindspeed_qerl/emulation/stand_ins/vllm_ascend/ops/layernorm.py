"""The norm of vLLM's models under its name on an NPU."""

import torch_npu
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm


class AscendRMSNorm(RMSNorm):
    """RMSNorm on npu_rms_norm and npu_add_rms_norm; reads self.weight at each call (VA ops/layernorm.py:66,107)."""

    def forward_oot(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)[0]
        y, _, residual = torch_npu.npu_add_rms_norm(x, residual, self.weight, self.variance_epsilon)
        return y, residual

    forward_cpu = forward_oot  # vLLM calls this one: to it the platform is a CPU
