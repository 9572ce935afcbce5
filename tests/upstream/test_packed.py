"""Our token ids beside those of MindSpeed-RL's own preprocessor, and read by MindSpeed-RL's own
data set.
"""

import json
import os
from pathlib import Path

import pytest
from rehearsal import CHECKOUTS, emulated, make_tokenizer, run_python

from mindspeed_qerl.demo.word_problems import make_problems, split_pairs, write_problems
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.packed import check_data_path, convert_packed
from mindspeed_qerl.tasks.rows import read_rows

UPSTREAM = os.environ.get("UPSTREAM")
pytestmark = pytest.mark.skipif(
    not UPSTREAM,
    reason=f"UPSTREAM names no folder with {', '.join(CHECKOUTS)}: "
    "nothing is compared with upstream's "
    "preprocessor",
)

READ = """
import json, sys
from types import SimpleNamespace
from mindspeed_rl.datasets.build_dataset import build_train_valid_test_datasets
from mindspeed_rl.datasets.indexed_dataset import get_packed_indexed_dataset
from mindspeed_rl.datasets.prompt_dataset import PromptDataset

data_path, max_prompt_length, folders = json.loads(sys.argv[1])
config = SimpleNamespace(is_pairwise_dataset=False, dataset_additional_keys=["labels"],
                         max_prompt_length=max_prompt_length)
data, _, _ = build_train_valid_test_datasets([data_path], "100,0,0", 4096, (1, 0, 0), PromptDataset,
                                             seed=1, extra_param=config)
unreadable = []
for folder in folders:
    try:
        get_packed_indexed_dataset(folder + "/gsm8k_train")
    except Exception:
        unreadable.append(folder)
rows = [{key: value.tolist() for key, value in data[i].items()} for i in range(len(data))]
print("RESULT", json.dumps([rows, unreadable]))
"""


def run_upstream(*arguments):
    """Standard output of a Python command that imports upstream, on one emulated NPU."""
    done = run_python(arguments, emulated(Path(UPSTREAM)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def preprocess(problems, prefix, tokenizer, *overrides):
    """What upstream's cli/preprocess_data.py makes of a jsonl: the command of docs/own_task.md."""
    run_upstream(
        f"{UPSTREAM}/MindSpeed-RL/cli/preprocess_data.py",
        "math_17k",
        f"input={problems}",
        f"output_prefix={prefix}",
        f"tokenizer_name_or_path={tokenizer}",
        "handler_name=R1AlpacaStyleInstructionHandler",
        "workers=1",
        "map_keys={prompt:problem,query:'',response:answer,system:''}",
        f"+cache_dir={prefix}_cache",
        f"hydra.run.dir={prefix}_hydra",
        *overrides,
    )


def packed_files(prefix, field):
    """The bytes of .bin and .idx."""
    return [
        Path(f"{prefix}_packed_{field}_document.{ending}").read_bytes() for ending in ("bin", "idx")
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with chat/, packed/ and tokenizer/, the training split as packed, the tokenizer)."""
    folder = tmp_path_factory.mktemp("made")
    problems = make_problems(split_pairs(0.1, 0)[0], 60, "train")
    (folder / "raw").mkdir()
    for split in ("train", "test"):
        write_problems(folder / "raw" / f"{split}.jsonl", problems)
    with open(folder / "raw" / "train.jsonl", "a", encoding="utf-8") as file:
        file.write(
            json.dumps(
                {"question": "Wie viele Äpfel kosten 5€?\nUnd 6€?", "answer": "#### -1,234,567"}
            )
            + "\n"
        )
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    convert(folder / "raw", folder / "chat")
    packed, _ = convert_packed(folder / "raw", folder / "packed", folder / "tokenizer")
    return folder, packed, tokenizer


@pytest.mark.parametrize(
    "prompt_type, overrides", [("qwen3", ["+enable_thinking=true"]), ("empty", [])]
)
def test_prompts_are_those_of_upstreams_preprocessor(made, tmp_path, prompt_type, overrides):
    """Given our question with its instruction (qwen3), or the rendered chat (empty): the same
    files, byte for byte.
    """
    folder, packed, tokenizer = made
    rows = [row.columns for row in read_rows(folder / "chat" / "train_chat.parquet")]
    with open(tmp_path / "train.jsonl", "w") as file:
        for row in rows:
            chat = tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, tokenize=False
            )
            problem = chat if prompt_type == "empty" else row["messages"][0]["content"]
            file.write(json.dumps({"problem": problem, "answer": row["answer"]}) + "\n")
    preprocess(
        tmp_path / "train.jsonl",
        tmp_path / "upstream",
        folder / "tokenizer",
        f"prompt_type={prompt_type}",
        *overrides,
    )
    for field in ("input_ids", "labels"):
        assert packed_files(packed.data_path, field) == packed_files(tmp_path / "upstream", field)


def test_upstreams_data_set_reads_our_rows(made, tmp_path):
    """Row by row, without those that `report` counts; and it cannot read what `check_data_path`
    refuses.
    """
    folder, packed, tokenizer = made
    refused = [
        tmp_path / name
        for name in ("a*", "a?", "[a]", "(a", "a)", "a{2}", "a|b", "a+", "^a", "$a", "a\\b")
    ]
    allowed = [tmp_path / name for name in ("a b", "a-b_c.d", "ä", "a]b}")]
    for copy in refused + allowed:
        copy.mkdir()
        for file in packed.data_path.parent.glob(f"{packed.data_path.name}_*"):
            (copy / file.name).symlink_to(file)
    limit = max(packed.prompt_lengths)
    out = run_upstream(
        "-c", READ, json.dumps([str(packed.data_path), limit, list(map(str, refused + allowed))])
    )
    rows, unreadable = json.loads(
        next(line for line in out.splitlines() if line.startswith("RESULT "))[len("RESULT ") :]
    )

    expected = [
        (tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True), row["answer"])
        for row in (row.columns for row in read_rows(folder / "chat" / "train_chat.parquet"))
    ]
    kept = [(prompt, answer) for prompt, answer in expected if len(prompt) < limit]
    left_out = len(expected) - len(kept)
    assert f"MindSpeed-RL leaves out {left_out:,}\n" in packed.report(limit) and left_out > 0
    assert [(row["input_ids"], tokenizer.decode(row["labels"])) for row in rows] == kept
    assert unreadable == list(map(str, refused))
    for copy in refused:
        with pytest.raises(ValueError, match="as a pattern"):
            check_data_path(copy)
    for copy in allowed:
        check_data_path(copy)
