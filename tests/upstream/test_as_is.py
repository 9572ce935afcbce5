"""Why the extension exists: what upstream alone does with the same configs."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rehearsal import environment, make_config

CASES = [  # family, change, what upstream says
    ("qwen3_moe", {}, "KeyError"),
    ("qwen3", {}, "KeyError"),
]


@pytest.mark.parametrize("family, changes, failure", CASES, ids=[case[0] for case in CASES])
def test_upstreams_lora_sync_fails(family, changes, failure, upstream, tiny, tmp_path):
    layout = dict(ep=2, infer_ep=2) if "moe" in family else {}
    config = make_config(family, *tiny(family), tmp_path, npus=2, **layout, changes=changes)
    config["rl_config"]["verifier_function"] = ["base_acc"]
    config["actor_config"]["save"] = str(tmp_path / "save")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    result = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "as_is.py"), str(tmp_path / "config.yaml")],
        check=False,
        cwd=tmp_path,
        env=environment(upstream),
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "FINISHED"))]
    print(said)
    assert (
        result.returncode == 1 and failure in said[-1] and "vllm_weight_container.py" in said[-1]
    ), result.stdout[-2000:] + result.stderr[-2000:]
