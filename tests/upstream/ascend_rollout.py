"""One engine of the real vllm-ascend on emulated NPUs beside transformers, as a process of its own
for each rank (test_vllm_ascend.py).
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

SIGMA = 0.05
# tokens: of the prefix that all prompts share, of the shortest rest, of an answer
SHARED, LONG, ANSWER = 140, 9, 6


@dataclass(frozen=True)
class Case:
    """What is served and where. dp: engines, each of tp ranks; experts are spread over all of them."""

    family: str
    dtype: str = "float32"
    tp: int = 1
    dp: int = 1
    soc: str = "910C"
    cann: str = "8.5.0"
    nz: int = 0
    chunked: bool = False
    formats: tuple[str, ...] = ()  # of quantized_ranks.py
    graphs: tuple[int, ...] = ()  # sizes of decode graphs
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))

    @property
    def moe(self) -> bool:
        return "moe" in self.family

    @property
    def shared(self) -> int:
        """Tokens that the prompts share, more than a block of the cache (128): but with CANN 8.5
        vllm-ascend reads cached prompts in half precision only (attention/attention_mask.py:94).
        """
        if self.dtype == "float32" and not self.cann.startswith("8.3"):
            return 0
        return 1010 if self.variables == FLASHCOMM else SHARED


# vllm-ascend prefetches below 500 tokens, and shares a dense model's tokens out among the ranks
# above 1000 (ascend_forward_context.py:114, 141)
PREFETCH = {"VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE": "1", "VLLM_ASCEND_ENABLE_PREFETCH_MLP": "1"}
FLASHCOMM = {"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}
CASES = [
    Case("qwen2", cann="8.3.RC1", nz=1),
    Case("qwen2", "bfloat16", tp=2, soc="910B"),
    Case("qwen3", "bfloat16", cann="8.3.RC1", nz=1),
    Case("qwen3", soc="910B", cann="8.3.RC1", chunked=True),
    Case("qwen3", "bfloat16", tp=2, variables=PREFETCH),
    Case("qwen3", "bfloat16", tp=2, cann="8.3.RC1", variables=FLASHCOMM),
    Case("qwen3_moe", tp=2, cann="8.3.RC1"),
    Case("qwen3_moe", dp=2, nz=1),
    Case("qwen3_moe", tp=2, soc="910B", nz=1),
    Case("qwen3_moe", dp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen3_moe", "bfloat16", tp=2, dp=2, cann="8.3.RC1", nz=1),
    Case("qwen3_moe", tp=2, cann="8.3.RC1", variables=FLASHCOMM),
    Case("qwen3_moe", tp=2, soc="910B", cann="8.3.RC1", chunked=True),
    Case("qwen2_moe", tp=2, soc="910B", cann="8.3.RC1"),
    Case("qwen2_moe", "bfloat16", dp=4, nz=1),
]
# the shared expert's parts: rule shared_expert_is_summed
UNSUMMED = Case("qwen2_moe", tp=2, cann="8.3.RC1")


def make(case: Case, folder: Path) -> Path:
    """The model of `case` below `folder`. In bfloat16 all experts are active: no rounding can
    change a route. Heads of 64 are the smallest that CANN's fused infer attention takes.
    """
    from rehearsal import make_model

    model, changes = folder / f"{case.family}-{case.dtype}", {"max_position_embeddings": 1200}
    if case.moe and case.dtype == "bfloat16":
        changes["num_experts_per_tok"] = 8
    if "qwen3" in case.family:
        changes["head_dim"] = 64
    return model if model.is_dir() else make_model(case.family, model, **changes)


def run_case(case: Case, model: Path, upstream: Path, script: str = __file__) -> list[dict]:
    """What each rank of `script` measured of `model`, with the checkouts in `upstream`."""
    from rehearsal import emulated, run_python

    world = case.tp * case.dp
    variables = {
        **emulated(upstream, world, case.soc, case.cann),
        **case.variables,
        "VLLM_DP_SIZE": str(case.dp),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASCEND_ENABLE_NZ": str(case.nz),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world, script]
    with tempfile.TemporaryDirectory() as folder:
        run = run_python([*words, json.dumps(asdict(case)), model, folder], variables)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


class Served:
    """This rank's engine of a case, with greedy answers; `runner` is vllm-ascend's."""

    def __init__(self, case: Case, folder: str):
        import torch

        # Megatron has done so when MindSpeed-RL makes its engine
        torch.distributed.init_process_group("hccl")
        self.case, self.replica = case, int(os.environ["RANK"]) // case.tp
        os.environ["VLLM_DP_RANK"] = str(self.replica)
        from vllm import LLM

        scheduler = {"enabled": True}
        if case.chunked:
            scheduler["enable_chunked_prefill"] = True
        self.engine = LLM(
            folder,
            dtype=case.dtype,
            enforce_eager=not case.graphs,
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY" if case.graphs else "NONE",
                "cudagraph_capture_sizes": list(case.graphs),
            },
            max_model_len=1200,
            max_num_seqs=4,
            seed=0,
            skip_tokenizer_init=True,
            gpu_memory_utilization=0.5,
            enable_prefix_caching=True,
            max_num_batched_tokens=64 if case.chunked else 1200,
            distributed_executor_backend="external_launcher",
            enable_expert_parallel=case.moe and case.tp * case.dp > 1,
            tensor_parallel_size=case.tp,
            additional_config={"ascend_scheduler_config": scheduler},
        )
        self.runner = self.engine.llm_engine.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.get_model()

    @property
    def prompts(self) -> list[list[int]]:
        """Of one engine: the second is asked less than the first, the lengths differ."""
        prefix, *rests = random_ids(5, self.case.shared, LONG, LONG + 7, LONG + 14)
        return [prefix + rest for rest in rests[: 3 - self.replica % 2]]

    def generate(self, prompts: list[list[int]], **sampling) -> list:
        """vLLM's outputs; the first prompt is asked alone before."""
        from vllm import SamplingParams, TokensPrompt

        self.engine.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=ANSWER, detokenize=False, ignore_eos=True, **sampling)
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
        self.engine.generate(asked[:1], sampling, use_tqdm=False)
        return self.engine.generate(asked, sampling, use_tqdm=False)

    def answers(self) -> tuple[list[tuple[list[int], list[float]]], int]:
        """Token ids and their log-probs for each prompt; and how many tokens of a prompt were
        cached, at most.
        """
        from reference import drawn

        outputs = self.generate(self.prompts, temperature=0.0, logprobs=0)
        cached = max(output.num_cached_tokens for output in outputs)
        return [drawn(output.outputs[0]) for output in outputs], cached

    def distance(self, answers: list, *twins):
        """How far the answers' log-probs are from the last of `twins`, which are transformers'
        models; or, of two, the first twin's are. A number for each token.
        """
        import torch

        scores = [torch.tensor([score for _, scores in answers for score in scores])]
        for twin in twins:
            rows = []
            for ids, (tokens, _) in zip(self.prompts, answers, strict=True):
                with torch.no_grad():
                    logits = twin(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
                logprobs = logits.float().log_softmax(-1)
                rows.append(logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0])
            scores.append(torch.cat(rows))
        return (scores[-2] - scores[-1]).abs()

    def write(self, results: str, report: dict) -> None:
        (Path(results) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))


def random_ids(seed: int, *counts: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 100, (count,), generator=generator).tolist() for count in counts]


def main(case: Case, folder: str, results: str) -> None:
    """This rank's part, written into `results`: greedy answers clean, with noise, and clean again,
    each beside transformers.
    """
    import torch
    import torch_npu
    import vllm_ascend
    from transformers import AutoModelForCausalLM
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    from mindspeed_qerl.aqn.injector import NoiseInjector
    from mindspeed_qerl.aqn.schedule import NoiseSchedule

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
    runner, model, report = served.runner, served.model, {}
    schedule = NoiseSchedule(sigma_start=SIGMA, sigma_end=SIGMA / 2, num_stages=2, total_steps=4)
    injector = NoiseInjector(model, seed=1)
    reference, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )

    def beside(answers) -> tuple[float, float]:
        """The largest distance from transformers in float32, and of its bfloat16 from that."""
        distances = (
            served.distance(answers, reference),
            served.distance(answers, rounded, reference),
        )
        return tuple(distance.max().item() for distance in distances)  # NaN, if there is one

    clean, report["cached"] = served.answers()
    report["clean"] = beside(clean)
    injector.apply(schedule.level(3))
    noisy, _ = served.answers()
    report["unmatched"], _ = beside(noisy)
    for twin in (reference, rounded):
        weights = dict(twin.named_parameters())
        for target in injector.targets:
            weights[f"{target.name}.weight"].data.copy_(target.module.weight)
    report["noisy"] = beside(noisy)
    if case.moe:
        report["routes"] = routes(served, reference)
    injector.remove()
    report["clean_again"] = served.answers()[0] == clean
    report["in_blocks"] = write_bytes(model)
    report["bytes_moved"] = served.answers()[0] != clean
    report["graphs"] = [
        type(runner).__name__,
        runner.use_aclgraph,
        runner.compilation_config.level,
    ]
    report |= {
        "package": vllm_ascend.__file__,
        "methods": sorted(chosen),
        "operators": sorted(operators),
        "classes": sorted({type(module).__name__ for module in model.modules()}),
    }
    served.write(results, report)


def routes(served: Served, reference) -> dict:
    """The routes of two answers to each of some prompts beside those that the float32 `reference`
    computes: how far below the weakest expert that it chooses the recorded ones lie at most, in its
    router's logits; that of routes which are off by a token or in other layers; how many routes
    there are; and what is said of cached prompts.
    """
    import numpy as np
    import torch

    from mindspeed_qerl.ascend.recorder import AscendRecorder
    from mindspeed_qerl.families import read_shape
    from mindspeed_qerl.routing.routes import routes_fault

    case, routers = served.case, read_shape(reference.name_or_path).routers
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
            layers = reference(torch.tensor([ids]), output_router_logits=True).router_logits
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
    import ctypes

    from torch_npu import get_npu_format

    in_blocks = [weight for weight in model.parameters() if get_npu_format(weight) == 29]
    for weight in in_blocks:
        values = weight.detach().clone()
        ctypes.memmove(weight.untyped_storage().data_ptr(), values.data_ptr(), values.nbytes)
    return len(in_blocks)


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), *sys.argv[2:])
