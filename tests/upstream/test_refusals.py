"""What cannot work is stopped with its message."""

import shutil

from rehearsal import CHECKOUTS, emulated, make_config, run_engine, run_python

from mindspeed_qerl.ascend.imports import PROBE


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
    result = run_engine(
        make_config("qwen3_moe", *tiny("qwen3_moe"), tmp_path, ep=2, infer_ep=2), changed, tmp_path
    )
    assert result.returncode == 1
    assert "upstream does not fit" in result.stderr and "MindSpeed-LLM in " not in result.stderr
    assert (
        "changed mindspeed_rl/models/rollout/vllm_engine.py (whole): our engine extends it"
        in result.stderr
    )
