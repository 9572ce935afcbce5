"""Quantized rollouts that say what each of their samples was drawn by, or with a planted fault.

FOLDER/rank{r}.jsonl has a line for each time that this rank asked vLLM: what for, at which step,
the most magnitudes that 16 inputs of a weight have, and how many layers multiply int8. FAULT:
"weight", one weight is left as it was synced; "layer", one layer is left on its own method.
"""

import driven
from driven import FAULT, Trainer  # noqa: F401

from mindspeed_qerl.ascend.quantized import Int8Linear


def magnitudes(model) -> int:
    """Of 16 inputs of a row, at most: 8 of E2M1 with one scale."""
    weight = model.model.layers[1].self_attn.o_proj.weight
    blocks = weight.abs().unflatten(-1, (-1, 16)).flatten(0, 1)
    return max(len(block.unique()) for block in blocks)


class Worker(driven.Worker):
    def _build_rollout(self):
        rollout = super()._build_rollout()
        sample, quantize, model = rollout.sample, rollout.quantized.quantize, rollout.model

        def told(prompts, **options):
            state = rollout.state
            methods = [getattr(module, "quant_method", None) for module in model.modules()]
            line = {"purpose": state.purpose, "step": state.step, "magnitudes": magnitudes(model)}
            line["int8_layers"] = sum(isinstance(method, Int8Linear) for method in methods)
            self.write(line)
            return sample(prompts, **options)

        def faulty():
            layer = model.model.layers[1].self_attn.o_proj
            synced, method = layer.weight.detach().clone(), layer.quant_method
            quantize()
            if FAULT == "weight":
                layer.weight.data.copy_(synced)
            elif FAULT == "layer":
                layer.quant_method = method

        rollout.sample, rollout.quantized.quantize = told, faulty
        return rollout
