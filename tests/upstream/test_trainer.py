"""trainer_cases.py with upstream's code on the path."""

import subprocess
import sys
from pathlib import Path

from rehearsal import environment

from mindspeed_qerl import emulation


def test_what_the_trainer_selects(upstream):
    variables = (
        emulation.environment(1)
        | environment(upstream, emulation.STAND_INS)
        | {"IS_MULTIMODAL": "False"}
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        Path(__file__).with_name("trainer_cases.py"),
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=600, env=variables
    )
    assert done.returncode == 0 and "13 passed" in done.stdout, (
        done.stdout[-5000:] + done.stderr[-2000:]
    )
