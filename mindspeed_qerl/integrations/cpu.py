"""vLLM on CPUs as a rollout engine that others sync into: to try an integration without a GPU."""

import torch


def keep_weights() -> None:
    """Make vLLM's CPU backend keep its weights as they are loaded. By itself it packs those of
    linear layers and experts for its kernels, and can load no others after that.

    Call it in the process of vLLM's workers before the engine is built. Products are torch's then,
    which are slower. For vLLM 0.32.
    """
    from torch.nn.functional import linear, silu
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, **_):
        weights = hidden_states.new_zeros(len(hidden_states), len(w1))
        weights = weights.scatter_add(1, topk_ids.long(), topk_weights.to(weights.dtype))
        output.zero_()
        for expert in range(len(w1)):
            gate, up = linear(hidden_states, w1[expert]).chunk(2, -1)
            output += linear(silu(gate) * up, w2[expert]) * weights[:, expert : expert + 1]

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *args: False
    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = apply


def refuse_packed_weights(model: torch.nn.Module) -> None:
    """Raises RuntimeError if vLLM has packed the weights of `model` and emptied the parameters."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise RuntimeError(
                f"vLLM's CPU backend has packed the weights for its kernels ({name} is empty), so "
                "that no trainer can sync others into it. Call "
                "mindspeed_qerl.integrations.cpu.keep_weights() before vLLM's engine is built; on "
                "GPUs and NPUs vLLM keeps its weights"
            )
