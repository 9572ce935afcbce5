"""A run of the real engine with quantized rollouts that says what each of its samples was drawn by,
or with a planted fault.

    python quantized_run.py CONFIG.yaml FOLDER [FAULT]

FOLDER/rank{r}.jsonl has a line for each time that this rank asked vLLM: what for, at which step,
the most magnitudes that 16 inputs of a weight have, and how many layers multiply int8. FAULT:
"weight", one weight is left as it was synced; "layer", one layer is left on its own method.
"""

import json
import sys
from pathlib import Path

from probe import FOLDER, main

FAULT = sys.argv[3] if len(sys.argv) > 3 else ""


def magnitudes(model) -> int:
    """Of 16 inputs of a row, at most: 8 of E2M1 with one scale."""
    blocks = (
        model.model.layers[1].self_attn.o_proj.weight.abs().unflatten(-1, (-1, 16)).flatten(0, 1)
    )
    return max(len(block.unique()) for block in blocks)


def quantized_classes():
    import ray

    from mindspeed_qerl.ascend.quantized import Int8Linear
    from mindspeed_qerl.ascend.trainer import QeRLTrainer
    from mindspeed_qerl.ascend.worker import QeRLWorker

    @ray.remote(resources={"NPU": 0.7})
    class QuantizedWorker(QeRLWorker.__ray_actor_class__):
        def _build_rollout(self):
            rollout = super()._build_rollout()
            sample, quantize, model = rollout.sample, rollout.quantized.quantize, rollout.model

            def told(prompts, **options):
                int8 = sum(
                    isinstance(getattr(module, "quant_method", None), Int8Linear)
                    for module in model.modules()
                )
                with open(Path(FOLDER) / f"rank{self._rank}.jsonl", "a") as file:
                    file.write(
                        json.dumps(
                            {
                                "purpose": rollout.state.purpose,
                                "step": rollout.state.step,
                                "magnitudes": magnitudes(model),
                                "int8_layers": int8,
                            }
                        )
                        + "\n"
                    )
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

    return QuantizedWorker, QeRLTrainer


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(quantized_classes))
