"""A draw of the noise for each answer or group in one engine of the real vllm-ascend (test_draws.py),
of a Case, with graphs or without: beside transformers with each answer's own draw; launches of a
decode step.
"""

from collections import Counter

import torch
from ascend_rollout import ANSWER, SIGMA, Case, Served, random_ids
from reference import drawn, scored_by_draws
from vllm import SamplingParams

from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.schedule import NoiseLevel, draw_numbers
from mindspeed_qerl.ascend import graphs as ours
from mindspeed_qerl.ascend import rollout
from mindspeed_qerl.emulation.counts import VARIABLE, counting, place

LEVEL = NoiseLevel(step=2, stage=1, sigma=SIGMA)
BLOCK = 128


class Drawn:
    """Answers of one engine, four at a time of eight or six; so that some are preempted, keys and
    values of five blocks are there.
    """

    def __init__(self, served: Served):
        self.served = served
        self.scheduler = served.engine.llm_engine.engine_core.engine_core.scheduler
        self.scheduler.scheduler_config.watermark = 0.0  # a share of all blocks, kept free
        self.pool = self.scheduler.kv_cache_manager.block_pool
        lengths = [BLOCK - 3, 9, BLOCK + 12, BLOCK + 19][: 4 - served.replica % 2]
        [row, *_] = random_ids(5, BLOCK + 19)
        # beginning alike, so that a prefix cache that draws shared would be hit
        self.prompts = [row[:length] for length in lengths]
        self.numbers = draw_numbers(served.case.draws, len(self.prompts), 2)
        allocate = self.scheduler.kv_cache_manager.allocate_slots

        def counted(request, *arguments, **more):
            running = request.status.name == "RUNNING"
            blocks = allocate(request, *arguments, **more)
            self.preempted += running and blocks is None
            return blocks

        self.scheduler.kv_cache_manager.allocate_slots = counted

    def answers(self, draws: bool = True) -> list:
        """Token ids and log-probs of two answers to each prompt."""
        self.preempted = 0  # requests
        self.served.engine.reset_prefix_cache()
        taken = self.pool.get_new_blocks(self.pool.get_num_free_blocks() - 5)
        # chunks set a seed back, which a CPU cannot (model_runner_v1.py:2072)
        seed = None if self.served.case.chunked else 3
        params = SamplingParams(
            n=2, seed=seed, max_tokens=2 * ANSWER, logprobs=0, detokenize=False, ignore_eos=True
        )
        asked = [{"prompt_token_ids": ids} for ids in self.prompts]
        each = [params] * len(asked)
        if draws:
            asked, each = rollout.requests_of_answers(asked, each, self.numbers)
        outputs = self.served.engine.generate(asked, each, use_tqdm=False)
        self.pool.free_blocks(taken)
        self.cached = max(output.num_cached_tokens for output in outputs)  # of a prompt
        return [drawn(answer) for output in outputs for answer in output.outputs]

    def apart(self, injector: NoiseInjector, answers: list, draws: list[int]) -> list[list[float]]:
        """For each answer the largest distance of its log-probs from transformers in float32 with
        the norms of a draw; and that of its bfloat16.
        """
        clean = {name: norm.weight.cpu() for name, norm, _ in injector.targets}
        sequences = [ids for ids in self.prompts for _ in range(2)]
        asked = [(ids, tokens) for ids, (tokens, _) in zip(sequences, answers, strict=True)]
        by_twin = [
            scored_by_draws(twin, clean, 1, LEVEL, asked, draws) for twin in self.served.twins
        ]
        found = []
        for (_, scores), exact, rounded in zip(answers, *by_twin):
            pair = (torch.tensor(scores) - exact, rounded - exact)
            found.append([each.abs().max().item() for each in pair])
        return found


def launches(answered: Drawn, draws: bool) -> dict[str, int]:
    """Kernels of the decode step that has most of them, by name."""
    runner = answered.served.runner
    execute, steps = runner.execute_model, []

    def executed(scheduled, *arguments, **more):
        counting.tallies.clear()
        with counting.phase("step"):
            result = execute(scheduled, *arguments, **more)
        sequences = len(scheduled.num_scheduled_tokens)
        is_decode = scheduled.total_num_scheduled_tokens == sequences == 4
        if is_decode and not scheduled.scheduled_new_reqs:
            tally = counting.tallies["step"]
            steps.append(Counter(tally.layers) + Counter(tally.outside))
        return result

    runner.execute_model = executed
    answered.answers(draws)
    del runner.execute_model
    counts = Counter(step.total() for step in steps)
    usual = counts.most_common(1)[0][0]
    return dict(next(step for step in steps if step.total() == usual))


def main(case: Case, folder: str) -> dict:
    if case.graphs:
        ours.install(max(case.graphs))
    served = Served(case, folder)
    answered = Drawn(served)
    graphs = ours.DecodeGraphs(served.runner) if case.graphs else None

    def ready():
        if graphs:
            graphs.addresses = None
            graphs.ready()

    ready()
    report = {}
    before = answered.answers(draws=False)
    counted = VARIABLE in case.variables
    if counted:
        place([*served.model.parameters(), *served.model.buffers()])
        report["launches"] = [launches(answered, draws=False)]
    injector = NoiseInjector(
        served.model, seed=1, draws=case.draws, runner=served.runner, stays=bool(case.graphs)
    )
    ready()
    # chunks draw without a seed: each time others
    report["off"] = answered.answers(draws=False) == before or case.chunked
    injector.apply(LEVEL)
    noisy = answered.answers()
    report |= {"preempted": answered.preempted, "cached": answered.cached}
    report["again"] = answered.answers() == noisy or case.chunked
    if counted:
        place([injector.rows.index, *injector.rows.tables])
        report["launches"].append(launches(answered, draws=True))
    injector.remove()
    report["off again"] = answered.answers(draws=False) == before or case.chunked
    own = answered.numbers
    report["apart"] = answered.apart(injector, noisy, own)
    report["other"] = answered.apart(injector, noisy, own[2:] + own[:2])
    report["norms"] = len(injector.targets)
    report["tables"] = [table[1:].double().sum().item() for table in injector.rows.tables]
    return report
