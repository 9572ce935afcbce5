"""What a transformers `Trainer` knows of a rollout: its step, its adapters, whether it evaluates,
and how far the policy that sampled is from its own.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mindspeed_qerl.algorithm.metrics import merge, mismatch
from mindspeed_qerl.lora.arrival import PREFIX, Factors

from .vllm import Method, WorkerRollout, wrap

# log-probs of a batch's tokens by vLLM and by the trainer, and their mask
Parts = tuple[Tensor | None, Tensor, Tensor]


def follow(rollout: WorkerRollout, trainer: Any) -> None:
    """The noise is that of the trainer's step and run, the update that of its adapters; what is
    known of the last sync goes into its log beside the loss.
    """
    rollout.step = lambda: trainer.state.global_step
    rollout.total_steps = lambda: trainer.state.max_steps
    rollout.adapters = lambda: adapters_of(trainer.model)

    def log(original: Method, logs: dict[str, float], *args, **kwargs) -> None:
        figures = rollout.figures() if "loss" in logs else {}
        original(logs | figures, *args, **kwargs)

    wrap(trainer, "log", log)


def adapters_of(model: torch.nn.Module) -> dict[str, list[Factors]]:
    """Returns PEFT's active adapters of linear layers by the name of the weight that they are
    merged into; without variants of LoRA, and without those of which a process has a part.
    """
    found: dict[str, list[Factors]] = {}
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "lora_A", None), torch.nn.ModuleDict):
            continue
        for name in module.active_adapters:
            if name not in module.lora_A or name in module.lora_variant:
                continue
            a = module.lora_A[name].weight
            b = module.lora_B[name].weight
            if not hasattr(b, "full_tensor"):
                weight = PREFIX.sub("", f"{path}.weight")
                found.setdefault(weight, []).append((a, b, module.scaling[name]))
    return found


def without_noise_in_evaluation(
    generate: Method, rollout: WorkerRollout, trainer: Any, engine: Any
) -> Method:
    """`generate`, but without noise while `trainer` evaluates. engine: vLLM's, whose cached
    prompts hold what the norms made of them.
    """

    def generate_in_mode(*args, **kwargs) -> Any:
        if trainer.model.training:
            return generate(*args, **kwargs)
        with rollout.clean():
            engine.reset_prefix_cache()
            result = generate(*args, **kwargs)
        engine.reset_prefix_cache()
        return result

    return generate_in_mode


def telling(
    score: Method, rollout: WorkerRollout, trainer: Any, parts_of: Callable[[Any], Iterable[Parts]]
) -> Method:
    """Makes `score`, which returns what is trained, tell `rollout` what its noise did.

    Args:
        parts_of: of what `score` returns, as `tell_mismatch` takes them.
    """
    rollout.is_told = True

    def score_and_tell(*args, **kwargs) -> Any:
        scored = score(*args, **kwargs)
        if trainer.model.training:
            tell_mismatch(rollout, trainer, parts_of(scored))
        return scored

    return score_and_tell


def tell_mismatch(rollout: WorkerRollout, trainer: Any, parts: Iterable[Parts]) -> None:
    """Tell `rollout` what its noise did, over the answers of all processes.

    Args:
        parts: log-probs of the tokens by vLLM (None: unknown) and by the trainer before its update,
            and their mask, each [answers, length].
    """
    found = []
    for sampled, trained, mask in parts:
        if sampled is None:  # ms-swift, where answers and log-probs do not match
            sampled = torch.full_like(trained, torch.nan)
        known = mask.bool() & sampled.isfinite()  # TRL has NaN where vLLM told nothing
        found.append(mismatch(sampled, trained, known))
    metrics = merge(found)
    values = {}
    for name in ("mismatch/k3", "mismatch/sensitivity"):
        metric = metrics[name]
        fields = torch.stack([value.double() for value in vars(metric).values()])
        sums = trainer.accelerator.gather(fields[None]).sum(0).tolist()
        values[name] = type(metric)(*sums).value()
    rollout.measured(values)
