"""Seconds of an iteration: beside every published speed that names its config (sources in
docs/layouts.md), operations beside transformers', and the command line that shows them.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mindspeed_qerl.families import NAMED_SHAPES, read_shape
from mindspeed_qerl.layout.memory import estimate, settings_of
from mindspeed_qerl.layout.parts import MemorySettings
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.layout.planner import PACKED, new_plan
from mindspeed_qerl.layout.sizes import training_weights
from mindspeed_qerl.layout.time import DEFAULT, HARDWARE, Terms, iteration, token_flops, total
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Batch, Layout
from tests import ROOT
from tests.local.conftest import make_model
from tests.tasks.gsm8k.tool import run_tool

CONFIG = "grpo_qwen3_30b_a3b_gsm8k_16npu"
ROLLOUT = ("sync", "prefill", "decode", "reward, dock")
PROMPT = 150  # tokens of a mean prompt, where a source does not say
# parameters a second of the host's AdamW; torch's does 99 to 168 million with a thread of a Xeon
ADAMW = (200e6, 30e6)


@dataclass
class Published:
    """One row: seconds of a step, or tokens a second and die. each: tokens of a mean prompt and
    answer, of seconds x tokens a second; without it an answer is a quarter to three quarters of the
    longest. rounds: of dynamic sampling.
    """

    model: str
    layout: Layout
    batch: Batch
    longest: int
    seconds: float | None = None
    tokens: float | None = None
    each: float | None = None
    prompt: float = PROMPT
    rounds: int = 1
    sequences: int = 512
    graphs: bool = False
    hardware: str = "910C"
    recomputes: bool = False  # verl computes old log-probs whatever an update takes
    reference: bool = True
    lora: bool = False
    rollout: bool = False  # its seconds alone
    on_host: float = 0.0  # share of parameters whose AdamW is the host's

    def range(self) -> tuple[float, float]:
        """Least and most, over what a launch costs and how long answers are."""
        layout = replace(self.layout, sequence_parallel=self.layout.tp > 1)
        plan = Plan(
            NAMED_SHAPES[self.model],
            layout,
            self.batch,
            self.lora,
            share_backbone=False,
            has_reference=self.reference,
            kl_in_reward=self.recomputes,
        )
        settings = MemorySettings(
            gpu_memory_utilization=0.8, max_num_seqs=self.sequences, enforce_eager=not self.graphs
        )
        memory = estimate(plan, settings)
        answers = (0.25 * self.longest, 0.75 * self.longest)
        if self.each:
            answers = (self.each - self.prompt,)
        predicted = []
        for answer in answers:
            terms = Terms(self.prompt, answer, self.longest, HARDWARE[self.hardware])
            phases = iteration(memory, terms)
            phases += [phase for phase in phases if phase.name in ROLLOUT] * (self.rounds - 1)
            if self.rollout:
                phases = [phase for phase in phases if phase.name in ("prefill", "decode")]
            tokens = self.batch.answers * (self.prompt + answer)
            updates = self.batch.global_batch_size // self.batch.mini_batch_size
            trained = self.on_host * updates * sum(training_weights(plan, 0))
            for seconds, adamw in zip(total(phases), ADAMW):
                seconds += trained / adamw
                rate = tokens / seconds / layout.world
                predicted.append(seconds if self.tokens is None else rate)
        return min(predicted), max(predicted)


def batch(
    prompts: int,
    n: int,
    micro_batch: int = 1,
    forward: int = 1,
    length: int = 4096,
    packed: int = 0,
    **more,
) -> Batch:
    """packed: answers side by side in rows of so many tokens."""
    if packed:
        names = [f"{name}_max_packing_token_size" for name in ("update", "actor", "ref")]
        more |= dict.fromkeys(names, packed)
        more |= dict(use_remove_padding=True, use_dynamic_bsz=True)
    given = dict(
        mini_batch_size=prompts,
        micro_batch_size=micro_batch,
        ref_forward_micro_batch_size=forward,
        seq_length=length,
        max_model_len=length,
    )
    return Batch(global_batch_size=prompts, samples_per_prompt=n, **given | more)


A3B = "qwen3_30b_a3b"
ROWS = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())


def test_published_speeds():
    """13 of 16 are in the range, and one on its edge; docs/layouts.md has each row, and what is said
    of the others.
    """
    table = (ROOT / "docs" / "layouts.md").read_text()
    missed = set()
    for name, given in ROWS.items():
        layout = Layout(**given.pop("layout"))
        row = Published(layout=layout, batch=batch(**given.pop("batch")), **given)
        published = row.tokens or row.seconds
        low, high = row.range()
        unit = "tokens/s a die" if row.tokens else "s a step"
        line = f"| {name} | {published:g} {unit} | {low:.0f} to {high:.0f} |"
        assert line in table, line
        if not low <= published <= high:
            missed.add(name)
    assert missed == {
        "verl-ascend-recipe, R3, 30B-A3B",
        "verl-ascend-recipe, CISPO, Qwen2.5-0.5B",
        "cann-recipes-train, GRPO, 235B-A22B",
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
    assert list(phases) == [*FIRST, *passes, "update"]
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


def test_draws_are_two_kernels_a_norm_and_a_copy_of_whose_row_it_is():
    """As counted (tests/upstream/test_draws.py), a captured step but for the kernels."""
    recipe = read_recipe(compose("grpo_qwen25_7b_gsm8k_8npu", ["aqn=qerl", "aqn.draws=answer"]))
    plan = plan_of(recipe)
    for eager in (True, False):
        settings = replace(settings_of(recipe), enforce_eager=eager)
        plain = replace(settings, drawn_norms=0)
        grouped = replace(recipe, noise=replace(recipe.noise, draws="group"))
        phases = [
            {phase.name: phase for phase in iteration(estimate(plan, each))}
            for each in (settings, plain, settings_of(grouped))
        ]
        drawn, without, _ = (found["decode"].launches for found in phases)
        steps = (drawn - without) / (1 + 2 * 2 * 28 * eager)
        assert steps == pytest.approx(DEFAULT.longest, rel=0.5)
        of_answers, none, of_groups = (found["prefill"].more for found in phases)
        assert of_answers == pytest.approx(8 * of_groups) and of_groups > none == 0


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
