"""Engines of the real vllm-ascend on emulated NPUs beside transformers, a process for each rank.

torchrun ascend_rollout.py MODULE CASE MODEL RESULTS    main of a module of this folder
"""

import importlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cached_property
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
    draws: str = "answer"  # of draws_ranks.py

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


def run_case(case: Case, models: Path, upstream: Path, module: str) -> list[dict]:
    """What `main` of a module of this folder returns on each rank for the model of `case`, which is
    made below `models`, with the checkouts in `upstream`.
    """
    from rehearsal import emulated, run_python

    model = make(case, models)
    world = case.tp * case.dp
    variables = {
        **emulated(upstream, world, case.soc, case.cann),
        **case.variables,
        "VLLM_DP_SIZE": str(case.dp),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASCEND_ENABLE_NZ": str(case.nz),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world, __file__]
    with tempfile.TemporaryDirectory() as folder:
        run = run_python([*words, module, json.dumps(asdict(case)), model, folder], variables)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


class Served:
    """This rank's engine of a case, with greedy answers; `runner` is vllm-ascend's."""

    def __init__(self, case: Case, folder: str):
        import torch
        import torch_npu  # noqa: F401
        import vllm_ascend  # noqa: F401

        # Megatron has done so when MindSpeed-RL makes its engine
        torch.distributed.init_process_group("hccl")
        self.folder = folder
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
        from reference import scored

        scores = [torch.tensor([score for _, scores in answers for score in scores])]
        for twin in twins:
            pairs = zip(self.prompts, answers, strict=True)
            scores.append(torch.cat([scored(twin, ids, tokens) for ids, (tokens, _) in pairs]))
        return (scores[-2] - scores[-1]).abs()

    @cached_property
    def twins(self) -> list:
        """transformers' models in float32 and bfloat16."""
        import torch
        from transformers import AutoModelForCausalLM

        return [
            AutoModelForCausalLM.from_pretrained(
                self.folder, attn_implementation="eager", dtype=dtype
            )
            for dtype in (torch.float32, torch.bfloat16)
        ]

    def beside(self, answers: list) -> list[float]:
        """The largest distance from transformers in float32, and of its bfloat16 from that; NaN, if
        there is one.
        """
        exact, rounded = self.twins
        distances = self.distance(answers, exact), self.distance(answers, rounded, exact)
        return [distance.max().item() for distance in distances]

    @cached_property
    def injector(self):
        from mindspeed_qerl.aqn.injector import NoiseInjector

        return NoiseInjector(self.model, seed=1)

    def noise(self, step: int | None) -> None:
        """The noise of a step on the norms; None: none."""
        if step is None:
            self.injector.remove()
        else:
            from mindspeed_qerl.aqn.schedule import NoiseSchedule

            schedule = NoiseSchedule(
                sigma_start=SIGMA, sigma_end=SIGMA / 2, num_stages=3, total_steps=4
            )
            self.injector.apply(schedule.level(step))

    def noise_twins(self) -> None:
        """Give the twins the norms of the model."""
        for twin in self.twins:
            for name, norm, _ in self.injector.targets:
                twin.get_parameter(f"{name}.weight").data.copy_(norm.weight)


def random_ids(seed: int, *counts: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 100, (count,), generator=generator).tolist() for count in counts]


if __name__ == "__main__":
    name, case, model, results = sys.argv[1:]
    report = importlib.import_module(name).main(Case(**json.loads(case)), model)
    (Path(results) / f"{os.environ['RANK']}.json").write_text(json.dumps(report))
