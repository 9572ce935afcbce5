"""Supervised steps against transformers' loss and torch's own optimizer, and tools/warm_up.py on a
tiny model.
"""

import json
import re

import pytest
import torch

from mindspeed_qerl.demo import tiny_model
from mindspeed_qerl.demo.supervised import fit, padded
from tests.tasks.gsm8k.tool import run_tool

PROMPTS, COMPLETIONS = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]
SOLUTIONS = ["7+1=<<7+1=8>>8\n#### 8", "3+4=7\n#### 7", "5-2=<<5-2=3>>3\n#### 3", "9\n#### 9"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm") / "base"
    tiny_model.make_tiny_model(
        folder, tiny_model.ModelRecipe(steps=0, train_problems=20, test_problems=20)
    )
    return folder


def warm_up(base, output, rows, *arguments):
    data = output.parent / f"{output.name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_tool("warm_up", "--model", base, "--data", data, "--output", output, *arguments)


def test_the_first_step_is_that_of_a_loop_of_ones_own(base):
    from transformers import AutoModelForCausalLM

    model, other = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    (loss,) = fit(model, [padded(PROMPTS, COMPLETIONS, pad=1)], 1, 1e-3)
    total, tokens = 0.0, 0
    for prompt, completion in zip(PROMPTS, COMPLETIONS):  # a row by itself, unpadded
        logits = other(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        for at, token in enumerate(completion, len(prompt) - 1):
            total, tokens = total - logits[at, token], tokens + 1
    assert loss == pytest.approx((total / tokens).item(), rel=1e-5)
    (total / tokens).backward()
    gradients = {
        name: weight.grad for name, weight in other.named_parameters() if weight.grad is not None
    }
    length = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    for name, gradient in gradients.items():
        clipped = gradient / max(length.item(), 1.0)
        # AdamW's first step: decayed, then the rate times the gradient's sign, where it is not tiny
        expected = before[name] * (1 - 1e-3 * 0.01) - 1e-3 * clipped / (clipped.abs() + 1e-8)
        large = clipped.abs() > 1e-5
        assert torch.allclose(model.state_dict()[name][large], expected[large], atol=2e-5), name


def test_products_in_bfloat16_train_the_weights_nearly_as_those_in_float32(base):
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    batch = padded(PROMPTS, COMPLETIONS, pad=1)
    changes, losses = [], []
    for bfloat16 in (False, True):
        model = AutoModelForCausalLM.from_pretrained(base)
        losses.append(fit(model, [batch] * 12, 12, 1e-3, bfloat16))
        changes.append(
            torch.cat(
                [(weight - before[name]).flatten() for name, weight in model.state_dict().items()]
            )
        )
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert losses[1] != losses[0] and losses[1][-1] < 0.5 * losses[1][0]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
    assert torch.cosine_similarity(*changes, dim=0) > 0.95


def test_a_model_that_is_warmed_up_knows_its_solutions(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [
        {"prompt": f"Tom has {index} apples.", "answer": solution[-1], "solution": solution}
        for index, solution in enumerate(SOLUTIONS)
    ] * 48
    done = warm_up(
        base,
        tmp_path / "warm",
        rows,
        *"--examples 160 --batch-size 16 --learning-rate 3e-3".split(),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "warm" / "warm_up.json").read_text())
    assert len(report["losses"]) == 10 and report["losses"][-1] < 0.8 * report["losses"][0]
    for step, loss in enumerate(report["losses"], 1):  # a log sees ten lines of it
        assert f"supervised training | step {step}/10 | loss {loss:.3f}\n" in done.stdout
    before, after = report["held_out"]
    assert f"loss of 32 held-out solutions {before:.3f} -> {after:.3f} nats" in done.stdout
    assert after < before - 0.5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "warm")
    # between those of the four kinds of rows
    for folder, reported in ((base, before), (tmp_path / "warm", after)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        losses = []
        for row in rows[:4]:
            solution = re.sub("<<.*>>", "", row["solution"])  # the calculator's mark is gone
            prompt, answer = (
                tokenizer.encode(part, add_special_tokens=False)
                for part in (row["prompt"], solution)
            )
            answer.append(tokenizer.eos_token_id)
            labels = torch.tensor([[-100] * len(prompt) + answer])
            losses.append(model(torch.tensor([prompt + answer]), labels=labels).loss.item())
        assert min(losses) < reported < max(losses)


@pytest.mark.parametrize(
    "rows, examples, message",
    [
        (
            [{"prompt": "a", "answer": "1", "solution": "1"}] * 33,
            2,
            "--examples 2, and 32 .* has 33 rows",
        ),
        ([{"prompt": "a", "answer": "1"}] * 33, 1, r"jsonl:1 has no column `solution`"),
    ],
)
def test_bad_data_are_refused_and_nothing_is_made(base, tmp_path, rows, examples, message):
    done = warm_up(base, tmp_path / "warm", rows, "--examples", examples)
    assert (
        done.returncode == 1 and re.search(message, done.stderr) and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "warm").exists()


@pytest.mark.parametrize("bad", [("--examples", "0"), ("--learning-rate", "nan")])
def test_numbers_that_cannot_be_are_refused(base, tmp_path, bad):
    done = warm_up(base, tmp_path / "warm", [], *bad)
    assert done.returncode == 1 and done.stderr == f"warm_up: {' '.join(bad)}: it must be above 0\n"


def test_a_model_that_got_worse_is_not_kept(base, tmp_path):
    rows = [{"prompt": "Tom has 3 apples.", "answer": "8", "solution": SOLUTIONS[0]}] * 40
    done = warm_up(
        base, tmp_path / "warm", rows, "--examples", 8, "--batch-size", 2, "--learning-rate", "1e30"
    )
    assert done.returncode == 1 and "nothing was learned, and nothing is kept" in done.stderr
    assert not (tmp_path / "warm").exists()
