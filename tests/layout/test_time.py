"""Seconds of an iteration: beside every published speed that names its config (sources in
docs/layouts.md), operations beside transformers', and the command line that shows them.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mindspeed_qerl.families import NAMED_SHAPES, read_shape
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import MemorySettings
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.planner import PACKED, new_plan
from mindspeed_qerl.layout.time import (
    DEFAULT,
    HARDWARE,
    Terms,
    iteration,
    token_flops,
    total,
)
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Batch, Layout
from tests import ROOT
from tests.local.conftest import make_model
from tests.tasks.gsm8k.tool import run_tool

CONFIG = "grpo_qwen3_30b_a3b_gsm8k_16npu"
ROLLOUT = ("sync", "prefill", "decode", "reward, dock")
GSM8K = (250, 400)  # tokens of a mean answer; of others a quarter to three quarters of the longest


@dataclass
class Published:
    """One row: seconds of a step, or tokens a second and die. rounds: of dynamic sampling."""

    model: str
    layout: Layout
    batch: Batch
    longest: int
    seconds: float | None = None
    tokens: float | None = None
    rounds: int = 1
    sequences: int = 512
    answer: tuple[float, float] | None = None
    hardware: str = "910C"
    recomputes: bool = False  # verl computes old log-probs whatever an update takes

    def range(self) -> tuple[float, float]:
        """Least and most, over what a launch costs and how long answers are."""
        shape = NAMED_SHAPES[self.model]
        layout = replace(
            self.layout,
            sequence_parallel=self.layout.tp > 1,
        )
        plan = Plan(shape, layout, self.batch, False, False, kl_in_reward=self.recomputes)
        settings = MemorySettings(gpu_memory_utilization=0.8, max_num_seqs=self.sequences)
        memory = estimate(plan, settings)
        predicted = []
        for answer in self.answer or (0.25 * self.longest, 0.75 * self.longest):
            terms = Terms(150, answer, self.longest, HARDWARE[self.hardware])
            phases = iteration(memory, terms)
            phases += [phase for phase in phases if phase.name in ROLLOUT] * (self.rounds - 1)
            tokens = self.batch.answers * (150 + answer)
            for seconds in total(phases):
                rate = tokens / seconds / layout.world
                predicted.append(seconds if self.tokens is None else rate)
        return min(predicted), max(predicted)


def batch(
    prompts: int, n: int, micro_batch: int = 1, forward: int = 1, length: int = 4096
) -> Batch:
    return Batch(
        prompts,
        prompts,
        n,
        micro_batch_size=micro_batch,
        ref_forward_micro_batch_size=forward,
        seq_length=length,
        max_model_len=length,
    )


TOGETHER = dict(use_remove_padding=True, use_dynamic_bsz=True)
A3B = "qwen3_30b_a3b"
ROWS = {
    "MindSpeed-RL, DAPO, 30B-A3B": Published(
        A3B, Layout(16, 4, ep=2, infer_ep=8), batch(32, 8), 2048, tokens=44, rounds=2
    ),
    "MindSpeed-RL, DAPO, Qwen3-32B": Published(
        "qwen3_32b", Layout(16, 8, 2, infer_tp=8), batch(32, 8), 2048, tokens=140
    ),
    "MindSpeed-RL, GRPO, Qwen2.5-7B": Published(
        "qwen25_7b", Layout(16, 2, 2), batch(32, 8, 4, 4), 2048, tokens=220
    ),
    "MindSpeed-RL, GRPO, Qwen3-8B": Published(
        "qwen3_8b", Layout(16, 2, 2), batch(32, 8, 1, 4, 10240), 8192, tokens=252
    ),
    "MindSpeed-RL, GRPO, Qwen2.5-32B": Published(
        "qwen25_32b",
        Layout(16, 4, 4, infer_tp=2),
        batch(64, 16, 2, 16, 3072),
        2048,
        tokens=220,
        sequences=64,
    ),
    "MindSpeed-RL, GRPO, Qwen2.5-32B, A2": Published(
        "qwen25_32b",
        Layout(16, 4, 4, infer_tp=2),
        batch(64, 16, 2, 32, 2048),
        1024,
        tokens=100,
        sequences=64,
        hardware="910B",
    ),
    "verl-ascend-recipe, GSPO, 30B-A3B": Published(
        A3B,
        Layout(16, 4, ep=4, infer_tp=4),
        batch(32, 4),
        1000,
        seconds=90.4,
        answer=GSM8K,
        recomputes=True,
    ),
    "verl-ascend-recipe, SAPO, 30B-A3B": Published(
        A3B,
        Layout(16, 4, ep=4, infer_tp=4),
        replace(batch(96, 8, length=6144), **TOGETHER, update_max_packing_token_size=6144),
        4096,
        seconds=450,
        hardware="910B",
        recomputes=True,
    ),
    "verl-ascend-recipe, R3, 30B-A3B": Published(
        A3B,
        Layout(32, 4, ep=4, infer_tp=4),
        batch(32, 4, length=1536),
        1000,
        seconds=343,
        answer=GSM8K,
        hardware="910B",
        recomputes=True,
    ),
}


def test_published_speeds():
    """Six of nine are in the range, and one on its edge; docs/layouts.md has each row, and what is
    said of the others.
    """
    table = (ROOT / "docs" / "layouts.md").read_text()
    missed = set()
    for name, row in ROWS.items():
        published = row.tokens or row.seconds
        low, high = row.range()
        unit = "tokens/s a die" if row.tokens else "s a step"
        line = f"| {name} | {published:g} {unit} | {low:.0f} to {high:.0f} |"
        assert line in table, line
        if not low <= published <= high:
            missed.add(name)
    assert missed == {
        "MindSpeed-RL, GRPO, Qwen2.5-32B",
        "MindSpeed-RL, GRPO, Qwen2.5-32B, A2",
        "verl-ascend-recipe, R3, 30B-A3B",
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama"])
def test_operations_of_a_token_are_those_of_transformers(family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        make_model(family, tmp_path), attn_implementation="eager", dtype=torch.float32
    )
    if family.endswith("moe"):
        model.set_experts_implementation("eager")  # each expert on its own tokens
    tokens = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None])
    shape = read_shape(str(tmp_path))
    expected = tokens * (token_flops(shape, tokens) + 2 * shape.hidden_size * shape.vocab_size)
    if family == "qwen2_moe":
        expected += tokens * 2 * shape.hidden_size * shape.num_hidden_layers  # shared expert's gate
    assert counter.get_total_flops() == expected


def phases_of(layout, given=PACKED, terms=DEFAULT, **settings):
    plan = new_plan(NAMED_SHAPES[A3B], layout, given)
    return {
        phase.name: phase for phase in iteration(estimate(plan, MemorySettings(**settings)), terms)
    }


FIRST = ["sync", "prefill", "decode", "reward, dock", "merging"]


@pytest.mark.parametrize(
    "changes, passes",
    [  # 64 prompts in one update, no KL
        ([], []),
        (["rl_config.mini_batch_size=32"], ["old log-probs"]),
        (["rl_config.mini_batch_size=128"], ["old log-probs"]),
        (["rl_config.epochs=2"], ["old log-probs"]),
        (["rl_config.init_kl_coef=0.01"], ["reference"]),
        (["algorithm.log_kl=true"], ["reference"]),
        (["rl_config.init_kl_coef=0.01", "rl_config.epochs=2"], ["reference", "old log-probs"]),
        (
            ["rl_config.init_kl_coef=0.01", "rl_config.use_kl_in_reward=true"],
            ["reference", "old log-probs"],
        ),
    ],
)
def test_forward_passes_before_the_update_are_upstreams(changes, passes):
    """grpo_trainer_hybrid.py:172 and 245, and ascend/trainer.py for KL in the reward."""
    recipe = read_recipe(compose(CONFIG, changes))
    plan = plan_of(recipe)
    phases = {phase.name: phase for phase in iteration(estimate(plan, settings_of(recipe)))}
    assert list(phases) == [*FIRST, "proof", *passes, "update"]
    for name in passes:
        rows = ceil(32 * 420 / 4096)  # of a rank's answers
        assert phases[name].launches == rows * (48 * 69 + 102)  # launches.yaml
        assert 0.1 < phases[name].device < phases["update"].device / 2


def test_steps_of_vllm_are_those_of_a_queue():
    """Answers of one length, with fewer places than answers: a brute-force queue takes as many
    steps.
    """
    terms = Terms(120, 100, 100)
    for sequences in (32, 16, 8, 5):
        decode = phases_of(Layout(16, ep=16, infer_ep=16), terms=terms, max_num_seqs=sequences)
        left, steps = [100] * 32, 0
        while any(left):
            running = [number for number, tokens in enumerate(left) if tokens][:sequences]
            for number in running:
                left[number] -= 1
            steps += 1
        a_step = 48 * 24 + 48  # launches.yaml
        predicted = decode["decode"].launches / a_step
        assert predicted == pytest.approx(steps, rel=0.15), sequences


def test_packed_rows_are_sent_in_an_eighth_of_the_launches():
    layout = Layout(16, ep=16, infer_ep=16)
    padded, packed = phases_of(layout, Batch()), phases_of(layout)
    assert packed["update"].launches < 45_000 and padded["update"].launches > 350_000


def test_draws_are_two_kernels_a_norm_and_a_copy_of_whose_row_it_is():
    """As counted (tests/upstream/test_draws.py), a captured step but for the kernels."""
    recipe = read_recipe(compose("grpo_qwen25_7b_gsm8k_8npu", ["aqn=qerl", "aqn.draws=answer"]))
    plan = plan_of(recipe)
    for eager in (True, False):
        settings = replace(settings_of(recipe), enforce_eager=eager)
        plain = replace(settings, drawn_norms=0)
        phases = [
            {phase.name: phase for phase in iteration(estimate(plan, each))}
            for each in (settings, plain)
        ]
        drawn, without = (found["decode"].launches for found in phases)
        steps = (drawn - without) / (1 + 2 * 2 * 28 * eager)
        assert steps == pytest.approx(DEFAULT.longest, rel=0.5)
        assert phases[0]["prefill"].more > 0 == phases[1]["prefill"].more


def test_a_slower_host_or_link_takes_longer():
    plan = new_plan(NAMED_SHAPES[A3B], Layout(16, 4, ep=4, infer_tp=4, infer_ep=4))
    memory = estimate(plan, MemorySettings())
    low, high = total(iteration(memory))
    assert low < high
    across = replace(plan, layout=replace(plan.layout, ranks_per_node=8))
    far = iteration(estimate(across, MemorySettings()))
    near = iteration(memory)
    assert sum(phase.device for phase in far) > sum(phase.device for phase in near)


# ---- the command line ----

plan_layout = partial(run_tool, "plan_layout")


def test_where_the_time_goes():
    shown = plan_layout("--config-name", CONFIG).stdout
    for name in (*FIRST, "update"):
        assert f"{name} " in shown
    assert "116 iterations: " in shown and "nothing was measured on an NPU" in shown
    assert (
        "120 tokens a prompt, 300 an answer, 600 the"
        in plan_layout("--config-name", CONFIG, "--tokens", "120,300,600").stdout
    )
