import io

import pytest
from rich.console import Console

from mindspeed_qerl.runs import progress as progress_module
from mindspeed_qerl.runs.progress import Progress


class Clock:
    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """What stands for the clock of the runs."""
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


@pytest.fixture
def console(monkeypatch):
    """A function that has runs print on a console of its arguments."""

    def use(**settings):
        monkeypatch.setattr(progress_module, "Console", lambda: Console(**settings))

    return use


def train(clock, steps, fail_at=None):
    with Progress(10, "tiny") as progress:
        progress.phase("starting engines")
        clock.now += 300.0  # start-up belongs to no step
        progress.evaluated(0, {"accuracy": 0.25, "standard_error": 0.021})
        for step in range(1, steps + 1):
            progress.phase("rollout")
            clock.now += 60.0
            if step == fail_at:
                raise RuntimeError
            sigma = 0.0 if step == 1 else 0.05
            progress.step(step, {"reward/mean": 0.5, "aqn/sigma": sigma, "time/step": 60.0})
        progress.message("see [bold] this :smile:")


STATE = "reward 0.500 | accuracy 0.250 ± 0.021 at 0"
LINES = [
    "tiny | held-out accuracy 0.250 ± 0.021 after 0 steps",
    f"tiny | step  1/10 | {STATE} | sigma off | 60.00 s/step | ETA 0:09:00",
    f"tiny | step  2/10 | {STATE} | sigma 5.0e-02 | 60.00 s/step | ETA 0:08:00",
    "see [bold] this :smile:",
]


def test_a_log_file_gets_one_plain_line_per_step(clock, console):
    file = io.StringIO()
    console(file=file, width=40)
    train(clock, steps=2)
    phases = ["tiny | starting engines ...", "tiny | rollout ..."]
    assert file.getvalue().splitlines() == [phases[0], LINES[0], phases[1], *LINES[1:]]


def test_a_terminal_gets_the_lines_and_what_is_done_now_and_its_cursor_back(clock, console):
    file = io.StringIO()
    terminal = dict(force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    console(file=file, width=130, **terminal)
    with pytest.raises(RuntimeError):
        train(clock, steps=3, fail_at=3)
    text = file.getvalue()
    for line in LINES[:3]:
        assert f"{line}\n" in text
    assert "tiny | rollout ..." in text and text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_resumed_run_has_its_accuracy_at_once(clock, console):
    file = io.StringIO()
    console(file=file, width=130)
    earlier = [{"step": step, "accuracy": step / 10, "standard_error": 0.02} for step in (0, 5)]
    Progress(10, "tiny", earlier).step(6, {"time/step": 1.0})
    assert "step  6/10 | accuracy 0.500 ± 0.020 at 5 |" in file.getvalue()


def test_the_pace_is_that_of_recent_steps(clock, console):
    file = io.StringIO()
    console(file=file)
    progress = Progress(100, "tiny")
    for step, seconds in enumerate([500.0] + [2.0] * 30, start=1):
        clock.now += seconds
        progress.step(step, {"time/step": seconds})
    lines = file.getvalue().splitlines()
    assert lines[1].endswith("251.00 s/step | ETA 6:49:58")
    assert lines[-1].endswith("2.00 s/step | ETA 0:02:18")
