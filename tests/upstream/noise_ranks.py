"""One engine of the real vllm-ascend with AQN's noise and without, beside transformers
(test_vllm_ascend.py).
"""

import ctypes
from itertools import chain

import numpy as np
import torch
import torch_npu
import vllm_ascend
from ascend_rollout import FLASHCOMM, Case, Served, random_ids
from torch_npu import get_npu_format
from vllm.distributed.parallel_state import GroupCoordinator
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from mindspeed_qerl.ascend.recorder import AscendRecorder
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.routing.routes import routes_fault


def main(case: Case, folder: str) -> dict:
    """This rank's part: greedy answers clean, with noise, and clean again, each beside
    transformers.
    """
    chosen, operators = set(), set()
    select = NPUModelRunner._select_moe_comm_method

    def selected(self, *args, **kwargs):
        method = select(self, *args, **kwargs)
        chosen.add(method.name)
        return method

    def counted(function, name):
        return lambda *args, **kwargs: operators.add(name) or function(*args, **kwargs)

    NPUModelRunner._select_moe_comm_method = selected
    GroupCoordinator.reduce_scatter = counted(GroupCoordinator.reduce_scatter, "reduce_scatter")
    for name, operator in list(vars(torch_npu).items()):
        if name.startswith(("npu_", "_npu_")):
            setattr(torch_npu, name, counted(operator, name))
    # takes rows that this rank has not (model_runner_v1.py:2571), unchecked there
    if case.variables == FLASHCOMM:
        NPUModelRunner.profile_run = lambda self: None
    served = Served(case, folder)
    runner, model = served.runner, served.model
    clean, cached = served.answers()
    report = {"cached": cached, "clean": served.beside(clean)}
    served.noise(2)
    noisy, _ = served.answers()
    report["unmatched"], _ = served.beside(noisy)
    served.noise_twins()
    report["noisy"] = served.beside(noisy)
    if case.moe:
        report["routes"] = routes(served)
    served.noise(None)
    report["clean_again"] = served.answers()[0] == clean
    report["in_blocks"] = write_bytes(model)
    report["bytes_moved"] = served.answers()[0] != clean
    compiled = runner.compilation_config.level
    return report | {
        "graphs": [type(runner).__name__, runner.use_aclgraph, compiled],
        "package": vllm_ascend.__file__,
        "methods": sorted(chosen),
        "operators": sorted(operators),
        "classes": sorted({type(module).__name__ for module in model.modules()}),
    }


def routes(served: Served) -> dict:
    """The routes of two answers to each of some prompts beside those that the float32 twin
    computes: how far below the weakest expert that it chooses the recorded ones lie at most, in its
    router's logits; that of routes which are off by a token or in other layers; how many routes
    there are; and what is said of cached prompts.
    """
    case, routers = served.case, read_shape(served.folder).routers
    recorder = AscendRecorder(served.runner, routers, 1200, served.model)

    def ask(prompts: list[list[int]], n: int) -> list[tuple[list[int], np.ndarray]]:
        """Token ids of each prompt and answer, and their routes."""
        # chunks set a seed back, which a CPU cannot (model_runner_v1.py:2072)
        with recorder.recording():
            outputs = served.generate(prompts, n=n, seed=None if case.chunked else 3)
        recorded = chain(*recorder.take(outputs))
        pairs = [
            (ids, answer) for ids, output in zip(prompts, outputs) for answer in output.outputs
        ]
        sequences = [ids + list(answer.token_ids) for ids, answer in pairs]
        return list(zip(sequences, recorded, strict=True))

    lengths = [110, 90, 70] if case.chunked else [9, 16, 23]  # below a block of the cache
    prompts = random_ids(7 + served.replica, *lengths[: 3 - served.replica % 2])
    report, faults, tokens = dict.fromkeys(("recorded", "shifted", "swapped"), -np.inf), [], 0
    for ids, recorded in ask(prompts, n=2):
        tokens += len(recorded)
        faults += filter(None, [routes_fault(recorded, len(ids) - 1, routers)])
        with torch.no_grad():
            layers = served.twins[0](torch.tensor([ids]), output_router_logits=True).router_logits
        # the last token was never computed
        logits = torch.stack([layer[:-1] for layer in layers], dim=1)
        weakest = logits.topk(routers.top_k).values[..., -1]
        planted = (recorded, np.roll(recorded, 1, axis=0), recorded[:, ::-1])
        for name, experts in zip(report, planted):
            chosen = logits.gather(-1, torch.from_numpy(experts.astype(np.int64)))
            below = (weakest - chosen.min(-1).values).max().item()
            report[name] = max(report[name], below)
    try:
        ask(served.prompts, n=1)
    except RuntimeError as error:
        faults.append(str(error))
    return {**report, "faults": faults, "tokens": tokens}


def write_bytes(model) -> int:
    """Write the values of every weight in FRACTAL_NZ over it as bytes in plain order, as a copy
    would that goes round torch's operators; how many there are.
    """
    in_blocks = [weight for weight in model.parameters() if get_npu_format(weight) == 29]
    for weight in in_blocks:
        values = weight.detach().clone()
        ctypes.memmove(weight.untyped_storage().data_ptr(), values.data_ptr(), values.nbytes)
    return len(in_blocks)
