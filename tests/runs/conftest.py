import math

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
    if aqn:
        stage = min(9, (step - 1) * 10 // total)
        sigma = 0.0 if stage == 0 else 0.05 * 0.01 ** ((stage - 1) / 8)
        metrics |= {
            "aqn/sigma": sigma,
            "aqn/stage": stage,
            "aqn/layers": 5 if sigma else 0,
            "aqn/expected_std": sigma,
            "aqn/measured_std": 1.01 * sigma,
            "aqn/changed_fraction": math.ceil(sigma),
        }
    return metrics


def evaluation(accuracy, error):
    ends = {"interval_low": accuracy - 2 * error, "interval_high": accuracy + 2 * error}
    return {"accuracy": accuracy, "standard_error": error, **ends}


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

    def make(steps, aqn=True):
        run = new_run()
        with MetricsWriter(run, tensorboard=False) as writer:
            writer.log_eval(0, evaluation(0.25, 0.02))
            for step in range(1, steps + 1):
                writer.log(step, metrics_of(step, steps, aqn))
            if steps:
                writer.log_eval(steps, evaluation(0.75, 0.03))
        run.finish()
        return run

    return make
