"""The evaluation tool: greedy answers against transformers, its numbers against its own
answers counted anew, what it refuses.

That a run's checkpoint gives the answers that the run gave is in test_run.py.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.families import read_shape
from mindspeed_qerl.families.fingerprint import model_files
from mindspeed_qerl.local import checkpoint
from mindspeed_qerl.local.evaluate import EvaluationJob, evaluate, of_run
from mindspeed_qerl.recipe.types import LoRA, Quantization
from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import read_jsonl
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS
from tests.tasks.gsm8k.tool import run_tool

from .conftest import raw_config


def test_answers_are_those_of_transformers_and_numbers_those_of_the_answers(tiny_model, tmp_path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    options = {
        "model": tiny_model,
        "data": tiny_model / "data/test_chat.parquet",
        "output": tmp_path / "out",
        "samples": 3,
        "dtype": "float32",
        "prompt": "plain",
        "max-tokens": 12,
        "verifier": "gsm8k",
        "kv-cache-gib": 1,
    }
    done = run_tool("evaluate", *(f"--{name}={value}" for name, value in options.items()))
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "data/test_chat.parquet, 16 questions, verifier gsm8k" in printed
    greedy, sampled = (
        read_jsonl(tmp_path / "out/greedy.jsonl"),
        read_jsonl(tmp_path / "out/answers.jsonl"),
    )
    assert len(greedy) == len(sampled) == 16

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    for row in greedy:
        prompt = tokenizer(f"{row['question']}\n", return_tensors="pt").input_ids
        with torch.no_grad():
            tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[
                0, prompt.shape[1] :
            ]
        assert row["responses"] == [tokenizer.decode(tokens, skip_special_tokens=True)]

    numbers = json.loads((tmp_path / "out/summary.json").read_text())["sampled"]
    verify = VERIFIERS["gsm8k"]
    scores = [[verify([text], [row["answer"]])[0] for text in row["responses"]] for row in sampled]
    assert (
        all(len(row) == 3 for row in scores)
        and len({text for row in sampled for text in row["responses"]}) > 8
    )
    assert numbers["accuracy"] == pytest.approx(sum(map(sum, scores)) / 48)
    assert numbers["pass@3"] == pytest.approx(sum(map(max, scores)) / 16)
    assert numbers["truncated_fraction"] == pytest.approx(
        sum(sum(row["truncated"]) for row in sampled) / 48
    )
    assert (
        f"{numbers['accuracy']:.3f} [{numbers['interval_low']:.3f}" in printed
        and "maj@k" in printed
    )


def job(model, folder, verifier, **more):
    rows = folder / "rows.jsonl"
    given = dict(prompt="plain", verifier=verifier, dtype="float32", kv_cache_gib=1, **more)
    return EvaluationJob(str(model), str(rows), **given)


def test_every_sampled_answer_has_a_seed_of_its_own(tiny_model, tmp_path):
    """Again with other answers beside them: the same. Of two equal questions, and of another seed:
    others.
    """
    [first, *_] = (tiny_model / "data/raw/test.jsonl").read_text().splitlines()
    prompt = json.dumps({"prompt": json.loads(first)["question"] + "\n", "answer": "x"})
    (tmp_path / "rows.jsonl").write_text(f"{prompt}\n" * 4)
    (tmp_path / "longer.py").write_text(
        "def longer(responses, answers, rows):\n    return list(map(len, responses))\n"
    )
    sys.path.append(str(tmp_path))
    what = job(tiny_model, tmp_path, "longer:longer", samples=3, max_tokens=12, max_num_seqs=12)
    asked = {"once": what, "again": replace(what, max_num_seqs=5), "other": replace(what, seed=2)}
    numbers = {
        name: evaluate(one, tmp_path / name, print)["sampled"] for name, one in asked.items()
    }
    texts = {
        name: [
            text
            for row in read_jsonl(tmp_path / name / "answers.jsonl")
            for text in row["responses"]
        ]
        for name in asked
    }
    assert (
        texts["once"] == texts["again"]
        and len(set(texts["once"])) > 6
        and not set(texts["once"]) & set(texts["other"])
    )
    assert numbers["once"]["accuracy"] == pytest.approx(sum(map(len, texts["once"])) / 12)
    assert not any(key.startswith(("rule/", "maj@")) for key in numbers["once"])


def test_prompts_fill_more_than_a_batch_of_tokens(tiny_model, tmp_path):
    """vLLM would cut one, which it cannot do with a seed for each answer where the generator is a
    CPU's.
    """
    # of fewer than 32 tokens, which no prompt has from another
    rows = [
        json.dumps({"prompt": f"{number} + 1 = ? " * 2, "answer": "1"})
        for number in range(100, 400)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    what = job(tiny_model, tmp_path, "gsm8k", samples=2, max_tokens=2, max_num_seqs=600)
    assert evaluate(what, tmp_path / "out", print)["sampled"]["n_problems"] == 300


@pytest.fixture
def create(tmp_path, tiny_model):
    """A run directory of a config, with the model's files as every run records them."""

    def create(raw, name="a_run", **more_files):
        files = model_files(tiny_model) | {"test": raw["task"]["test_file"]} | more_files
        return RunDirectory.create(
            tmp_path, name, config=raw, command=["cli"], seed=7, data_files=files
        )

    return create


def test_a_run_is_evaluated_as_it_evaluates(tiny_model, data_dir, create):
    raw = raw_config(tiny_model, data_dir)
    run = create(raw)
    expected = EvaluationJob(
        model=str(tiny_model),
        data=f"{data_dir}/test_chat.parquet",
        run=str(run.path),
        step=0,
        seed=7,
        prompt="plain",
        verifier="gsm8k_strict",
        samples=4,
        temperature=1.0,
        max_tokens=24,
        max_prompt_length=96,
        max_num_seqs=256,
        dtype="float32",
    )
    assert of_run(run.path, step=0) == expected
    given = dict(samples=2, verifier="gsm8k", dtype="bfloat16")
    assert of_run(run.path, step=0, **given) == replace(expected, **given)
    with pytest.raises(ConfigError, match="has no checkpoint: give the step 0"):
        of_run(run.path)

    raw["eval"] |= {"temperature": 0, "samples_per_problem": 1}
    raw["hardware_error"]["evaluation"] = "gaussian"
    run = create(raw, "foreign")
    greedy = replace(expected, samples=0)
    hardware = {"kinds": ("gaussian",), "gaussian_std": 0.05, "block": 64}
    assert of_run(run.path, step=0) == replace(greedy, run=str(run.path), hardware_error=hardware)
    raw |= {"hardware_error": {}, "rollout_quantization": {"format": "nvfp4"}}
    run = create(raw, "rounded")
    assert of_run(run.path, step=0) == replace(greedy, run=str(run.path))
    raw["rollout_quantization"]["evaluation"] = True
    run = create(raw, "as_sampled")
    as_sampled = Quantization("nvfp4", evaluation=True)
    assert of_run(run.path, step=0) == replace(greedy, run=str(run.path), quantization=as_sampled)


def test_a_run_whose_files_are_others_is_not_evaluated(tiny_model, data_dir, tmp_path, create):
    raw, test = raw_config(tiny_model, data_dir), tmp_path / "test.parquet"
    shutil.copy(raw["task"]["test_file"], test)
    raw["task"]["test_file"] = str(test)
    run = create(raw, test=test)
    assert of_run(run.path, step=0).data == str(test)
    shutil.copy(raw["task"]["train_file"], test)
    with pytest.raises(
        ConfigError, match="seen other files than are there now.*--data.*\ntest.sha256 was"
    ):
        of_run(run.path, step=0)
    assert of_run(run.path, step=0, data=str(test)).data == str(test)  # it was given


def test_a_checkpoint_of_another_run_is_not_evaluated(tiny_model, data_dir, tmp_path, create):
    raw = raw_config(tiny_model, data_dir)
    run, other = create(raw), create(raw, "another")
    adapters = checkpoint.describe(read_shape(tiny_model), LoRA(4, 8.0, ("linear_qkv",)))
    state = {"run": other.id, **adapters}
    checkpoint.save(run.checkpoints_dir, 3, state, lambda folder: None, 1)
    with pytest.raises(ValueError, match=f"iter_0000003 is of another run .id {other.id}; "):
        evaluate(of_run(run.path), tmp_path / "out", print)


@pytest.mark.parametrize(
    "given, error, message",
    [
        (
            {"verifier": "exact"},
            ConfigError,
            (
                "unknown verifier 'exact'. Known: gsm8k, gsm8k_strict, math. Your own is written "
                "module:function"
            ),
        ),
        ({"temperature": 0.0}, ValueError, "temperature\n.* greater than 0"),
        ({"data": "no.parquet"}, OSError, "no.parquet"),
        ({"prompt": "chat"}, ConfigError, "chat_template is not set.* takes task.prompt=plain"),
        (
            {"max_prompt_length": 2},
            ConfigError,
            "is longer than rl_config.max_prompt_length = 2 tokens",
        ),
        (
            {"hardware_error": {"kinds": ["gaussian"]}, "tensor_parallel_size": 2},
            ConfigError,
            "in one process of vLLM for CPUs: give --tensor-parallel-size 1, add --no-emulate-npu",
        ),
        (
            {"quantization": Quantization("fp8"), "emulate_npu": True},
            ConfigError,
            "or leave them out .--quantization none",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tiny_model, tmp_path, given, error, message
):
    what = {
        "model": str(tiny_model),
        "data": f"{tiny_model}/data/test_chat.parquet",
        "prompt": "plain",
    } | given
    with pytest.raises(error, match=message):
        evaluate(EvaluationJob(**what), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_the_emulated_npu_is_entered_before_vllm_asks_for_its_platform(tiny_model, tmp_path):
    program = """
import importlib.util, sys
from mindspeed_qerl import emulation
from mindspeed_qerl.local import evaluate
def enter(npus):
    sys.exit(f"{npus} NPUs, imported: {sorted({'torch', 'vllm'} & {*sys.modules})}")
emulation.enter = enter
importlib.util.find_spec = lambda name: name
job = evaluate.EvaluationJob(*sys.argv[1:3], emulate_npu=True, tensor_parallel_size=2)
evaluate.evaluate(job, evaluate.Path(sys.argv[3]), print)
"""
    paths = [tiny_model, tiny_model / "data" / "test_chat.parquet", tmp_path / "out"]
    command = [sys.executable, "-c", program, *map(str, paths)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "2 NPUs, imported: []"


def test_an_evaluation_is_written_once(tiny_model, tmp_path):
    with pytest.raises(
        FileExistsError, match="an evaluation is written once. Choose another name, or remove it"
    ):
        evaluate(EvaluationJob(str(tiny_model), "data"), tmp_path, print)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "m"], "give --run, or --model, --data and --output"),
        (["--run", "r", "--output", "o"], "a run's evaluations lie in it"),
        (
            ["--model", "m", "--data", "d", "--output", "o", "--step", "3"],
            "--name and --step go with --run",
        ),
        (
            ["--run", "r", "--gaussian-std", "0.1"],
            "--gaussian-std and --block go with --hardware-error",
        ),
        (["--run", "r", "--hardware-error", "rust"], "invalid choice: 'rust'"),
    ],
)
def test_wrong_arguments(arguments, message):
    done = run_tool("evaluate", *arguments)
    assert done.returncode == 2 and message in done.stderr
