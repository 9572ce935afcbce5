"""AQN and the proof of arrival in vllm-ascend's own worker on emulated NPUs, three syncs
(test_integrations.py).
"""

import tempfile
from pathlib import Path

import torch
from ascend_rollout import Case, Served

from mindspeed_qerl.integrations.report import read_lines
from mindspeed_qerl.integrations.settings import Settings
from mindspeed_qerl.integrations.vllm import WorkerRollout


def load(model, weights: dict) -> None:
    """As verl and ms-swift do: experts, which vllm-ascend has turned to [in, out], are turned back
    while they are loaded.
    """
    experts = [module for module in model.modules() if hasattr(module, "w13_weight")]

    def turn() -> None:
        for module in experts:
            for weight in (module.w13_weight, module.w2_weight):
                weight.data = weight.data.transpose(1, 2).contiguous()
                weight.weight_loader = module.weight_loader

    turn()
    model.load_weights(weights.items())
    turn()


def main(case: Case, folder: str) -> dict:
    """Greedy answers after each of three syncs of changed weights, beside transformers with the
    noise that is on this rank's norms.
    """
    served = Served(case, folder)
    worker = served.engine.llm_engine.model_executor.driver_worker.worker
    noise = {"sigma_start": 0.05, "num_stages": 2, "total_steps": 4}
    lines = Path(tempfile.mkdtemp()) / "noise"
    rollout = WorkerRollout(
        worker, Settings(report=str(lines), noise=noise, elements=0, stop=False)
    )
    twin = served.twins[0]
    generator = torch.Generator().manual_seed(3)
    report = {"worst": [], "clean": []}
    for step in (1, 2, 3):
        rollout.step = lambda step=step: step
        with torch.no_grad():
            for weight in twin.parameters():
                weight.add_(0.01 * torch.randn(weight.shape, generator=generator))
        sent = {name: weight.detach().clone() for name, weight in twin.named_parameters()}
        load(served.model, sent)
        answers, _ = served.answers()
        for name, weight in served.model.named_parameters():
            if "layernorm" in name or name == "model.norm.weight":
                twin.get_parameter(name).data.copy_(weight)
        report["worst"].append(served.distance(answers, twin).max().item())
        twin.load_state_dict(sent, strict=False)
    with rollout.clean():
        for name, weight in served.model.named_parameters():
            if "layernorm" in name:
                report["clean"].append(torch.equal(weight, sent[name]))
    return report | {"rows": read_lines(lines)}
