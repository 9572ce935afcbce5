"""The real preflight in fake boxes: the healthy ones pass whole, and faults of a box are seen by
what would see them.
"""

import json
import subprocess

import pytest

from tests.fake_box import OF_THE_HOST, Box, left_over, run, why_not
from tests.fake_box.prepared import prepare

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
THIRTY = "grpo_qwen3_30b_a3b_gsm8k"


def preflight(
    box, name, folder, *options, prepared=True, **arguments
) -> dict[str, tuple[str, str]]:
    """name of each check of the real tools/preflight.py in that box -> state and what was found."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        **(prepare(name, folder / "files", 2 if "2x8" in name else 1) if prepared else {}),
    }
    done = run(
        box,
        ["python", "tools/preflight.py", "--config-name", name, "--json", *options],
        folder / "box",
        environment,
        sourced=True,
        **arguments,
    )
    assert done.stdout, done.stderr
    return {
        check["name"]: (check["state"], check["found"])
        for check in json.loads(done.stdout)["checks"]
    }


@pytest.mark.parametrize(
    ("box", "name"),
    [
        (Box(), f"{THIRTY}_16npu"),
        (Box(mapped=12), f"{THIRTY}_12npu"),
        (Box(dies=8, kind="910B3", soc="Ascend910B3"), "grpo_qwen25_7b_gsm8k_8npu"),
    ],
    ids=["16", "12 mapped", "8"],
)
def test_healthy_boxes_pass_whole(box, name, tmp_path):
    checks = preflight(box, name, tmp_path, "--own-ray")
    assert {name for name, (state, _) in checks.items() if state != "passed"} <= OF_THE_HOST, checks


def test_what_is_the_boxs_own(tmp_path):
    """Devices, network, processes, memory, /tmp and commands; what is left running is told, and
    gone with the box.
    """
    script = (
        "ls /dev | grep -c davinci[0-9]; cat /sys/fs/cgroup/memory.max; head -1 /proc/meminfo;"
        "command -v ip || echo no ip; echo mine > /tmp/of_the_box; sleep 600 & "
        "until grep -q sleep /proc/$!/comm; do :; done; exit 3"
    )
    done = run(
        Box(mapped=2, memory=10**12, cgroup={"memory.max": "99\n"}, without=("ip",)),
        ["bash", "-c", script],
        tmp_path,
    )
    assert done.returncode == 3 and done.stdout.split() == [
        "2",
        "99",
        "MemTotal:",
        "976562500",
        "kB",
        "no",
        "ip",
    ], done
    assert left_over(tmp_path) == ["sleep 600"]
    assert subprocess.run(["test", "-e", "/tmp/of_the_box"], check=False).returncode == 1
