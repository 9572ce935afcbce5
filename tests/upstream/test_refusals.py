"""What cannot work is stopped with its message, and how long that takes (printed)."""

import shutil
import time

import pytest
from rehearsal import CHECKOUTS, emulated, make_config, run_engine, run_python

from mindspeed_qerl.ascend.imports import PROBE

REFUSED = [  # name, changes, exit code, message
    (
        "a misspelt verifier",
        {"rl_config.verifier_function": ["gsm8k_strickt"]},
        2,
        (
            "rl_config.verifier_function: unknown verifier 'gsm8k_strickt', did you mean "
            "'gsm8k_strict'?"
        ),
    ),
    (
        "an extra config key",
        {"rl_config.n_sample_per_prompt": 4},
        2,
        "unknown key in rl_config: 'n_sample_per_prompt', did you mean 'n_samples_per_prompt'?",
    ),
]


@pytest.mark.parametrize(
    "changes, code, message", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_config_that_cannot_work(changes, code, message, upstream, tiny, tmp_path):
    started = time.perf_counter()
    result = run_engine(
        make_config("qwen3_moe", *tiny("qwen3_moe"), tmp_path, ep=2, infer_ep=2, changes=changes),
        upstream,
        tmp_path,
    )
    print(f"\n{time.perf_counter() - started:.1f} s: {result.stderr.strip()[:200]}")
    assert result.returncode == code and message in result.stderr
    assert not (tmp_path / "rehearsal").exists()


def test_what_the_preflight_imports_is_what_is_there(upstream):
    """Each step on the real upstream; the last is compiled, and nobody compiled it here."""
    done = run_python(["-c", PROBE], emulated(upstream, 2))
    assert done.stdout.splitlines()[-1].startswith(
        "cannot import vllm_ascend_C: ModuleNotFoundError"
    ), done


def test_a_changed_upstream_file(upstream, tiny, tmp_path):
    """Text prompts fixed in upstream itself: our own way around them would replace what no longer
    exists.
    """
    changed = tmp_path / "upstream"
    changed.mkdir()
    for name in CHECKOUTS[1:]:
        (changed / name).symlink_to(upstream / name)
    shutil.copytree(
        upstream / CHECKOUTS[0],
        changed / CHECKOUTS[0],
        ignore=shutil.ignore_patterns(".git", "docs"),
    )
    file = changed / CHECKOUTS[0] / "mindspeed_rl" / "models" / "rollout" / "vllm_engine.py"
    file.write_text(
        file.read_text().replace(
            "decode(p, skip_special_tokens=True)", "decode(p, skip_special_tokens=False)"
        )
    )
    started = time.perf_counter()
    result = run_engine(
        make_config("qwen3_moe", *tiny("qwen3_moe"), tmp_path, ep=2, infer_ep=2), changed, tmp_path
    )
    print(f"\n{time.perf_counter() - started:.1f} s: {result.stderr.strip()[:400]}")
    assert result.returncode == 1
    assert "upstream does not fit" in result.stderr and "MindSpeed-LLM in " not in result.stderr
    assert (
        "changed mindspeed_rl/models/rollout/vllm_engine.py:1 (whole): our engine extends it"
        in result.stderr
    )
