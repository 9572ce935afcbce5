import json
import math
import subprocess
import sys

import pytest

from mindspeed_qerl.runs.directory import RunDirectory
from mindspeed_qerl.runs.metrics import MetricsWriter


def metrics_of(step, total, aqn=True):
    """Made-up metrics of one step: learning, and QeRL's ten noise stages."""
    metrics = {
        "reward/mean": 0.25 + 0.5 * step / total,
        "entropy/mean": 0.5 / step,
        "entropy/first_tokens": 0.6 / step,
        "mismatch/k1": -1e-7 * step,
        "mismatch/k3": 1e-12 * step,
        "mismatch/mean_abs_prob_diff": 1e-7,
        "mismatch/max_abs_prob_diff": 2e-6,
        "time/rollout": 9.0 if step == 1 else 0.3,
        "time/update": 0.2,
        "time/sync": 0.01,
    }
    metrics["time/step"] = (
        math.fsum(value for name, value in metrics.items() if name.startswith("time/")) + 0.05
    )
    if aqn:
        stage = min(9, (step - 1) * 10 // total)
        sigma = 0.0 if stage == 0 else 0.05 * 0.01 ** ((stage - 1) / 8)
        metrics |= {
            "aqn/sigma": sigma,
            "aqn/stage": stage,
            "aqn/layers": 5 if sigma else 0,
            "aqn/expected_std": sigma,
            "aqn/measured_std": 1.01 * sigma,
            "aqn/changed_fraction": 1.0 if sigma else 0.0,
        }
    return metrics


def evaluation(accuracy, error, seconds):
    ends = {"interval_low": accuracy - 2 * error, "interval_high": accuracy + 2 * error}
    return {"accuracy": accuracy, "standard_error": error, "seconds": seconds, **ends}


@pytest.fixture
def new_run(tmp_path):
    def create(name="test", **config):
        return RunDirectory.create(
            tmp_path, name, config=config, command=["train"], seed=1, data_files={}
        )

    return create


@pytest.fixture
def made_run(new_run):
    """A function that makes a run of `steps` steps, evaluated at step 0 and at the end."""

    def make(steps, name="made", aqn=True, ended=True):
        run = new_run(name)
        with MetricsWriter(run, tensorboard=False) as writer:
            writer.log_eval(0, evaluation(0.25, 0.02, 7.0))
            for step in range(1, steps + 1):
                writer.log(step, metrics_of(step, steps, aqn))
            if steps:
                writer.log_eval(steps, evaluation(0.75, 0.03, 0.4))
        if ended:
            run.finish()
        return run

    return make


@pytest.fixture
def run_killed(tmp_path):
    """A function that starts Python code which makes a run and kills itself (SIGKILL); returns its
    directory.
    """

    def start(code):
        prelude = (
            "import json, os, signal\nfrom pathlib import Path\nfrom "
            "mindspeed_qerl.runs.directory import RunDirectory\nfrom mindspeed_qerl.runs.metrics "
            f"import MetricsWriter\nrun = RunDirectory.create(Path({str(tmp_path)!r}), 'killed', "
            "config={}, command=['x'], seed=1, "
            "data_files={})\nprint(json.dumps(str(run.path)), flush=True)\n"
        )
        child = subprocess.run(
            [sys.executable, "-c", prelude + code + "\nos.kill(os.getpid(), signal.SIGKILL)"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == -9, child.stderr
        return RunDirectory.open(json.loads(child.stdout.splitlines()[0]))

    return start
