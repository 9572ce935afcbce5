import io

import pytest
from rich.console import Console

from mindspeed_qerl.runs.progress import Progress


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def train(progress, clock, steps, seconds, fail_at=None):
    with progress:
        progress.phase("starting engines")
        clock.now += 300.0  # start-up belongs to no step
        progress.evaluated(0, {"accuracy": 0.25, "standard_error": 0.021})
        for step in range(1, steps + 1):
            progress.phase("rollout")
            clock.now += seconds
            if step == fail_at:
                raise RuntimeError
            progress.step(
                step,
                {"reward/mean": 0.5, "aqn/sigma": 0.0 if step == 1 else 0.05, "time/step": seconds},
            )
        progress.message("see [bold] this")


def test_a_log_file_gets_one_plain_line_per_step():
    file, clock = io.StringIO(), Clock()
    train(
        Progress(10, "tiny", console=Console(file=file, width=40), clock=clock),
        clock,
        steps=3,
        seconds=60.0,
    )
    assert file.getvalue().splitlines() == [
        "tiny | starting engines ...",
        "tiny | held-out accuracy 0.250 ± 0.021 after 0 steps",
        "tiny | rollout ...",
        (
            "tiny | step  1/10 | reward 0.500 | accuracy 0.250 ± 0.021 at 0 | sigma off | 60.00 "
            "s/step | ETA 0:09:00"
        ),
        (
            "tiny | step  2/10 | reward 0.500 | accuracy 0.250 ± 0.021 at 0 | sigma 5.0e-02 | "
            "60.00 s/step | ETA 0:08:00"
        ),
        (
            "tiny | step  3/10 | reward 0.500 | accuracy 0.250 ± 0.021 at 0 | sigma 5.0e-02 | "
            "60.00 s/step | ETA 0:07:00"
        ),
        "see [bold] this",
    ]


def test_a_terminal_shows_the_last_state_and_messages_unchanged():
    file, clock = io.StringIO(), Clock()
    console = Console(
        file=file, width=110, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}
    )
    train(Progress(10, "tiny", console=console, clock=clock), clock, steps=3, seconds=60.0)
    shown = file.getvalue()
    assert "see [bold] this\n" in shown
    assert "3/10  0:08:00  ETA 0:07:00" in shown
    assert "done  reward 0.500  accuracy 0.250 ± 0.021 at 0  sigma 5.0e-02  60.00 s/step" in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_failure_says_where_and_leaves_the_terminal_usable():
    file, clock = io.StringIO(), Clock()
    console = Console(
        file=file, width=110, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}
    )
    with pytest.raises(RuntimeError):
        train(
            Progress(10, "tiny", console=console, clock=clock),
            clock,
            steps=3,
            seconds=60.0,
            fail_at=2,
        )
    assert "stopped in: rollout" in file.getvalue()
    assert file.getvalue().rstrip().endswith("\x1b[?25h")


def test_the_pace_is_that_of_recent_steps():
    clock = Clock()
    progress = Progress(100, "tiny", console=Console(file=io.StringIO()), clock=clock)
    assert progress.seconds_per_step is None
    for step, seconds in enumerate([500.0] + [2.0] * 30, start=1):
        clock.now += seconds
        progress.step(step, {"time/step": seconds})
        if step == 2:
            assert progress.seconds_per_step == 251.0
    assert progress.seconds_per_step == 2.0
