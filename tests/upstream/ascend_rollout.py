"""One engine of the real vllm-ascend on emulated NPUs beside transformers, as a process of its own
for each rank (test_vllm_ascend.py).
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

SIGMA = 0.05
SHARED, LONG, ANSWER = (
    140,
    9,
    6,
)  # tokens: of the prefix that all prompts share, of the shortest rest, of an answer


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
    eager: bool = True
    quantised: str = ""  # a kind that w8a8.quantise knows
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            self.family,
            self.dtype,
            f"tp{self.tp}",
            f"dp{self.dp}",
            self.soc,
            self.cann,
            f"nz{self.nz}",
        ]
        also = (
            ["chunked"] * self.chunked
            + ["graphs"] * (not self.eager)
            + [self.quantised] * bool(self.quantised)
        )
        return "-".join([*parts, *also, *self.variables])

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
    Case("qwen2", "bfloat16", quantised="W8A8"),
    Case("qwen3", "bfloat16", tp=2, cann="8.3.RC1", quantised="W8A8"),
    Case("qwen3", "bfloat16", quantised="W8A8_DYNAMIC"),
]
UNSUMMED = Case(
    "qwen2_moe", tp=2, cann="8.3.RC1"
)  # the shared expert's parts: rule shared_expert_is_summed


def make(case: Case, folder: Path) -> Path:
    """The model of `case` below `folder`. In bfloat16 all experts are active: no rounding can
    change a route. Heads of 64 are the smallest that CANN's fused infer attention takes.
    """
    from rehearsal import make_model
    from w8a8 import quantise

    model = folder / f"{case.family}-{case.dtype}"
    if case.quantised:
        plain, model = (
            make(replace(case, quantised=""), folder),
            folder / f"{case.family}-{case.quantised}",
        )
        return model if model.is_dir() else quantise(plain, model, case.quantised)
    changes = (
        {"num_experts_per_tok": 8} if "moe" in case.family and case.dtype == "bfloat16" else {}
    )
    changes |= {"head_dim": 64} if "qwen3" in case.family else {}
    changes["max_position_embeddings"] = 1200
    return model if model.is_dir() else make_model(case.family, model, **changes)


def run_case(case: Case, model: Path, upstream: Path, script: str = __file__) -> list[dict]:
    """What each rank of `script` measured of `model`, with the checkouts in `upstream`."""
    from rehearsal import environment

    from mindspeed_qerl import emulation

    world, variables = case.tp * case.dp, environment(upstream)
    emulated = emulation.environment(world, case.soc, case.cann)
    emulated["PYTHONPATH"] = os.pathsep.join([str(emulation.STAND_INS), variables["PYTHONPATH"]])
    variables = {
        **variables,
        **emulated,
        **case.variables,
        "VLLM_DP_SIZE": str(case.dp),
        "HF_HUB_OFFLINE": "1",
        "VLLM_ASCEND_ENABLE_NZ": str(case.nz),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(world),
                script,
                json.dumps(asdict(case)),
                str(model),
                folder,
            ],
            env=variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def main(case: Case, folder: str, results: Path) -> None:
    """This rank's part, written into `results`: greedy answers clean, with noise, and clean again,
    each beside transformers.
    """
    import torch
    import torch_npu
    import w8a8

    torch.distributed.init_process_group(
        "hccl"
    )  # Megatron has done so when MindSpeed-RL makes its engine
    replica = int(os.environ["RANK"]) // case.tp
    os.environ["VLLM_DP_RANK"] = str(replica)
    import vllm_ascend
    from transformers import AutoModelForCausalLM
    from vllm import LLM
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
    if (
        case.variables == FLASHCOMM
    ):  # takes rows that this rank has not (model_runner_v1.py:2571), unchecked there
        NPUModelRunner.profile_run = lambda self: None
    scheduler = {"enabled": True, **({"enable_chunked_prefill": True} if case.chunked else {})}
    engine = LLM(
        folder,
        dtype=case.dtype,
        enforce_eager=case.eager,
        max_model_len=1200,
        max_num_seqs=4,
        seed=0,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        max_num_batched_tokens=64 if case.chunked else 1200,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel="moe" in case.family and case.tp * case.dp > 1,
        tensor_parallel_size=case.tp,
        quantization="ascend" if case.quantised else None,
        additional_config={"ascend_scheduler_config": scheduler},
    )
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    graphs = [type(runner).__name__, runner.use_aclgraph, runner.compilation_config.level]
    model = runner.get_model()
    injector = NoiseInjector(
        model,
        NoiseSchedule(sigma_start=SIGMA, sigma_end=SIGMA / 2, num_stages=2, total_steps=4),
        seed=1,
    )
    load = (
        w8a8.load
        if case.quantised
        else partial(AutoModelForCausalLM.from_pretrained, attn_implementation="eager")
    )
    reference, rounded = load(folder, dtype=torch.float32), load(folder, dtype=torch.bfloat16)
    clean, cached = answers(engine, case, replica)
    worst, own = distances(clean, reference, rounded, case, replica)
    injector.apply(3)
    engine.reset_prefix_cache()
    noisy, _ = answers(engine, case, replica)
    unmatched, _ = distances(noisy, reference, rounded, case, replica)
    for twin in (reference, rounded):
        weights = dict(twin.named_parameters())
        for target in injector.targets:
            weights[f"{target.name}.weight"].data.copy_(target.module.weight)
    worst_noisy, own_noisy = distances(noisy, reference, rounded, case, replica)
    engine.reset_prefix_cache()
    routed = (
        routes(engine, case, replica, reference) if "moe" in case.family else None
    )  # of the noisy model
    injector.remove()
    engine.reset_prefix_cache()
    again = answers(engine, case, replica)[0]
    in_blocks = write_bytes(model)
    engine.reset_prefix_cache()
    raw, _ = answers(engine, case, replica)
    (results / f"{os.environ['RANK']}.json").write_text(
        json.dumps(
            {
                "package": vllm_ascend.__file__,
                "methods": sorted(chosen),
                "operators": sorted(operators),
                "graphs": graphs,
                "worst": worst,
                "own": own,
                "worst_noisy": worst_noisy,
                "own_noisy": own_noisy,
                "unmatched": unmatched,
                "clean_again": again == clean,
                "cached": cached,
                "in_blocks": in_blocks,
                "bytes_moved": raw != clean,
                "routes": routed,
                "classes": sorted({type(module).__name__ for module in model.modules()}),
            }
        )
    )


def routes(engine, case: Case, replica: int, reference) -> dict:
    """The routes of two answers to each of some prompts beside those that the float32 `reference`
    computes: how far below the weakest expert that it chooses the recorded ones lie at most, in its
    router's logits; that of routes which are off by a token or in other layers; how many routes
    there are; and what is said of cached prompts.
    """
    import numpy as np
    import torch
    from vllm import SamplingParams, TokensPrompt

    from mindspeed_qerl.ascend.recorder import AscendRecorder
    from mindspeed_qerl.families import read_shape
    from mindspeed_qerl.routing.routes import routes_fault

    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    routers = read_shape(reference.name_or_path).routers
    recorder = AscendRecorder(runner, routers, 1200, runner.get_model())

    def ask(asked: list[list[int]], n: int) -> tuple[list, list]:
        seed = (
            None if case.chunked else 3
        )  # chunks set it back, which a CPU cannot (model_runner_v1.py:2072)
        sampling = SamplingParams(
            n=n, max_tokens=ANSWER, seed=seed, detokenize=False, ignore_eos=True
        )
        with recorder.recording():
            outputs = [
                engine.generate(
                    [TokensPrompt(prompt_token_ids=ids) for ids in part], sampling, use_tqdm=False
                )
                for part in (asked[:1], asked)
            ][1]
        return outputs, recorder.take(outputs)

    lengths = [110, 90, 70] if case.chunked else [9, 16, 23]  # below a block of the cache
    generator = torch.Generator().manual_seed(7 + replica)
    asked = [
        torch.randint(1, 100, (length,), generator=generator).tolist()
        for length in lengths[: 3 - replica % 2]
    ]
    outputs, found = ask(asked, n=2)
    below, faults = {"recorded": [], "shifted": [], "swapped": []}, []
    for prompt, output, of_prompt in zip(asked, outputs, found, strict=True):
        for answer, recorded in zip(output.outputs, of_prompt, strict=True):
            ids = prompt + list(answer.token_ids)
            faults += [routes_fault(recorded, len(ids) - 1, routers)]
            with torch.no_grad():
                logits = reference(torch.tensor([ids]), output_router_logits=True).router_logits
            logits = torch.stack(
                [layer[:-1] for layer in logits], dim=1
            )  # the last token was never computed
            weakest = logits.topk(routers.top_k).values[..., -1]
            for name, planted in (
                ("recorded", recorded),
                ("shifted", np.roll(recorded, 1, axis=0)),
                ("swapped", recorded[:, ::-1]),
            ):
                chosen = logits.gather(-1, torch.from_numpy(planted.astype(np.int64)))
                below[name].append((weakest - chosen.min(-1).values).max().item())
    engine.reset_prefix_cache()
    try:
        ask(prompts(case, replica), n=1)
    except RuntimeError as error:
        faults.append(str(error))
    engine.reset_prefix_cache()
    return {
        **{name: max(values) for name, values in below.items()},
        "faults": [fault for fault in faults if fault],
        "tokens": sum(len(recorded) for of_prompt in found for recorded in of_prompt),
    }


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


def prompts(case: Case, replica: int) -> list[list[int]]:
    """Of one engine: the second is asked less than the first, the lengths differ."""
    import torch

    generator = torch.Generator().manual_seed(5)
    prefix = torch.randint(1, 100, (case.shared,), generator=generator).tolist()
    rests = [torch.randint(1, 100, (LONG + 7 * i,), generator=generator).tolist() for i in range(3)]
    return [prefix + rest for rest in rests[: 3 - replica % 2]]


def answers(engine, case: Case, replica: int) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Token ids and their log-probs for each prompt; and how many tokens of a prompt were cached,
    at most: the first prompt is asked alone before.
    """
    from reference import drawn
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(
        max_tokens=ANSWER, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True
    )
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts(case, replica)]
    outputs = [engine.generate(part, sampling, use_tqdm=False) for part in (asked[:1], asked)][1]
    found = [drawn(output.outputs[0]) for output in outputs]
    return found, max(output.num_cached_tokens for output in outputs)


def distances(found: list, reference, rounded, case: Case, replica: int) -> tuple[float, float]:
    """Largest difference of a log-prob from `reference`, and of `rounded`, transformers in
    bfloat16, from it.
    """
    import torch

    ours, theirs = [], []
    for ids, (tokens, logprobs) in zip(prompts(case, replica), found):
        with torch.no_grad():
            exact, half = (
                twin(torch.tensor([ids + tokens]))
                .logits[0, len(ids) - 1 : -1]
                .float()
                .log_softmax(-1)
                for twin in (reference, rounded)
            )
        picked, picked_half = (
            x.gather(1, torch.tensor(tokens)[:, None])[:, 0] for x in (exact, half)
        )
        ours.append((torch.tensor(logprobs) - picked).abs().max().item())
        theirs.append((picked_half - picked).abs().max().item())
    return torch.tensor(ours).max().item(), torch.tensor(
        theirs
    ).max().item()  # NaN, if there is one


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
