"""Data of runs: word problems in GSM8K's form, converted."""

from mindspeed_qerl.demo.word_problems import make_problems, split_pairs, write_problems
from mindspeed_qerl.tasks.gsm8k.convert import convert


def converted(folder, train, test):
    """The folder of as many training and test rows."""
    raw, made = folder / "raw", folder / "gsm8k"
    raw.mkdir()
    training, held_out = split_pairs(0.15, 0)
    write_problems(raw / "train.jsonl", make_problems(training, train, 1))
    write_problems(raw / "test.jsonl", make_problems(held_out, test, 2))
    convert(raw, made)
    return made
