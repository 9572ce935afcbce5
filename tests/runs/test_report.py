import io
import math
import subprocess
import sys
import warnings
from contextlib import redirect_stdout

import numpy
import pytest

from mindspeed_qerl.runs import plots
from mindspeed_qerl.runs.metrics import MetricsWriter, read_jsonl, series
from mindspeed_qerl.runs.report import write_report
from mindspeed_qerl.tasks.evaluation import interval

ALL_PLOTS = ["exploration.png", "learning.png", "mismatch.png", "noise.png", "time.png"]


def report(run):
    """(rows of what the terminal shows, rows of summary.md, both as lists of words without bars;
    names of the pictures); a warning of matplotlib or numpy is an error.
    """
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as terminal:
        warnings.simplefilter("error")
        write_report(run)
    pictures = sorted(path.name for path in run.plots_dir.iterdir())
    pages = (terminal.getvalue(), run.summary_file.read_text())
    return *([line.replace("|", " ").split() for line in page.splitlines()] for page in pages), (
        pictures
    )


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are to be saved, instead of their files."""
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, file, **_: figures.append(figure))
    return figures


def test_summary_is_what_the_files_say(made_run):
    run = made_run(20)
    run.record(
        engine_start_seconds=12.53,
        lora={name: {"modules": 2, "parameters": 12288} for name in ("linear_qkv", "linear_proj")},
        lora_movement={"linear_qkv": {"arrived": 0.98765, "arrived_error": 0.00612}},
    )
    terminal, summary, pictures = report(run)
    for row in (
        "state finished",
        "steps 20",
        "seconds to start 12.5",
        "first 0 0.250 ± 0.020",
        "best 20 0.750 ± 0.030",
        "last 20 0.750 ± 0.030",
        "reward/mean 0.275 0.75 0.512 0.75",
        "mismatch/k3 1e-12 2e-11 1.05e-11 2e-11",
        "time/rollout 9 0.3 0.735 9",
        "0 1-2 0 0 0 0",
        "1 3-4 5 0.05 0.0505 1",
        "9 19-20 5 0.0005 0.000505 1",
        "linear_qkv 2 12,288 0.988 ± 0.006",
        "linear_proj 2 12,288 not seen",
    ):
        assert row.split() in summary and row.split() in terminal
    assert pictures == ALL_PLOTS
    for picture in pictures:
        assert f"![{picture[:-4]}](plots/{picture})" in run.summary_file.read_text()


@pytest.mark.parametrize(
    "scores, words",
    [
        ([[1, 0], [0, 1]], "0.500 [0.150, 0.850]"),  # Wilson's for two of four
        ([[1]], "1.000 [0.207, 1.000]"),
        ([[1, 1]] * 4, "1.000 [0.510, 1.000]"),
        ([[0]] * 7, "0.000 [0.000, 0.354]"),
        ([[0.3]], "0.300"),
        ([[0.3], [0.3]], "0.300"),
        ([[1], [0], [1], [1]], "0.750 ± 0.250"),
    ],
)
def test_an_accuracy_of_0_or_1_or_of_few_questions_is_drawn_and_told(new_run, scores, words):
    of_problems, run = numpy.mean(scores, axis=1), new_run()
    low, high = interval(numpy.array(scores, dtype=float))
    error = of_problems.std(ddof=1) / len(scores) ** 0.5 if scores[1:] else math.nan
    row = {"accuracy": of_problems.mean(), "standard_error": error}
    with MetricsWriter(run, tensorboard=False) as writer:
        ends = numpy.nextafter([low, high], [1, 0])  # as rounding may leave them
        writer.log_eval(0, row | dict(zip(("interval_low", "interval_high"), ends)))
    _, summary, pictures = report(run)
    assert pictures == ["learning.png"] and ["first", "0", *words.split()] in summary


def test_a_picture_that_cannot_be_drawn_is_named_and_in_nobodys_way(made_run, monkeypatch, capsys):
    run, draw = made_run(20), plots._draw_panel
    (run.path / "plots").mkdir()
    (run.plots_dir / "time.png").write_bytes(b"an older one")

    def fail(axes, rows, panel):
        if panel.title.startswith("Time of a step"):
            raise ArithmeticError("no such ticks")
        draw(axes, rows, panel)

    monkeypatch.setattr(plots, "_draw_panel", fail)
    write_report(run)
    summary, words = run.summary_file.read_text(), "time.png cannot be drawn: ArithmeticError: no"
    assert f"> **Missing:** {words}" in summary and words in capsys.readouterr().err
    assert "![learning](plots/learning.png)" in summary and "state | finished" in summary
    assert not (run.plots_dir / "time.png").exists()


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")
@pytest.mark.parametrize("steps, aqn", [(1, True), (2, True), (20, False), (130, True)])
def test_pictures_of_short_and_long_runs_have_whole_axes(made_run, drawn, steps, aqn):
    run = made_run(steps, aqn)
    names = ("step", "accuracy", "interval_low", "interval_high")
    evals = [dict(zip(names, row)) for row in ((0, 0.0, 0.0, 0.1), (steps, 1.0, 0.7, 1.0))]
    rows = read_jsonl(run.metrics_file)
    files, missing = plots.write_plots(rows, evals, run.plots_dir, "a run " * 60)
    assert missing == []
    assert sorted(file.name for file in files) == [
        name for name in ALL_PLOTS if aqn or name != "noise.png"
    ]
    for figure in drawn:
        figure.draw_without_rendering()
        bottom = figure.axes[-1]
        low, high = bottom.get_xlim()
        ticks = [tick for tick in bottom.get_xticks() if low <= tick <= high]
        assert ticks and all(tick == round(tick) for tick in ticks)
        (extent,) = [text.get_window_extent() for text in figure.texts]
        assert extent.x1 <= figure.bbox.x1


def test_an_axis_does_not_show_rounding(tmp_path, drawn):
    shares = {1: 1 - 6e-8, 40: 1 + 7e-8}
    rows = [{"step": step, "sync/arrived/linear_qkv": share} for step, share in shares.items()]
    plots.write_plots(rows, [], tmp_path, "a run")
    drawn[0].draw_without_rendering()
    [axes] = drawn[0].axes
    low, high = axes.get_ylim()
    assert low < 0.96 and high > 1.04 and not axes.yaxis.get_offset_text().get_text()


def test_a_run_that_did_not_finish_gets_its_report(new_run):
    run = new_run()
    terminal, _, pictures = report(run)
    assert ["state", "running,", "or", "killed"] in terminal and pictures == []
    run.fail("rank 1 was killed | no memory\nleft")
    report(run)
    reason = "failed: rank 1 was killed \\| no memory<br>left |"
    assert reason in run.summary_file.read_text()


def test_pictures_draw_the_values_of_the_files(made_run, drawn):
    run = made_run(20)
    rows, evals = read_jsonl(run.metrics_file), read_jsonl(run.eval_file)
    plots.write_plots(rows, evals, run.plots_dir, "a run")
    (reward, accuracy), _, (std, _), (kl, _), (time,) = (figure.axes for figure in drawn)
    for line, name in (
        (reward.lines[0], "reward/mean"),
        (kl.lines[1], "mismatch/k3"),
        (time.lines[0], "time/rollout"),
    ):
        expected = numpy.column_stack(series(rows, name))
        numpy.testing.assert_array_equal(line.get_xydata(), expected)
    numpy.testing.assert_array_equal(kl.lines[0].get_ydata(), -series(rows, "mismatch/k1")[1])
    for line, name in zip(std.lines, ("aqn/expected_std", "aqn/measured_std")):
        noisy = [row[name] for row in rows if row[name]]  # a log axis has no 0
        numpy.testing.assert_array_equal(line.get_ydata(), noisy)
    numpy.testing.assert_array_equal(accuracy.lines[0].get_xydata(), [(0, 0.25), (20, 0.75)])
    bars = [segment[:, 1] for segment in accuracy.collections[0].get_segments()]
    ends = [[row["interval_low"], row["interval_high"]] for row in evals]
    numpy.testing.assert_allclose(bars, ends)


def test_what_only_looks_fine_is_called_out_and_drawn_without_a_warning(new_run):
    run = new_run()
    off = {"reward/mean": 0.0, "mismatch/k3": 0.0, "aqn/sigma": 0.0, "aqn/stage": 0}
    with MetricsWriter(run, tensorboard=False) as writer:
        for step, loss in ((1, 1.0), (2, math.nan)):
            writer.log(step, {"loss/total": loss, **off})
    terminal, _, _ = report(run)
    summary = run.summary_file.read_text()
    assert summary.count("> **Warning:** ") == 2
    assert "> **Warning:** loss/total was NaN or infinite, first in step 2" in summary
    assert "> **Warning:** the reward was 0 at every step" in summary
    assert sum("Warning:" in line for line in terminal) == 2


def test_the_command_writes_the_report_without_torch_and_explains_what_is_wrong(made_run):
    run = made_run(3)
    # An entry of None in sys.modules makes `import torch` fail.
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "runpy.run_module('mindspeed_qerl.runs.report', run_name='__main__')"
    )

    def command(path):
        words = [sys.executable, "-c", code, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    done = command(run.path)
    assert done.returncode == 0 and "Report:" in done.stdout, done.stderr
    assert sorted(path.name for path in run.plots_dir.iterdir()) == ALL_PLOTS
    run.metrics_file.write_text("{}}\n" + run.metrics_file.read_text())
    for path, message in (
        (run.path, "metrics.jsonl:1: damaged line"),
        ("no/such/run", "no/such/run is not a run directory"),
    ):
        failed = command(path)
        assert failed.returncode == 1 and "Traceback" not in failed.stderr
        assert failed.stderr.startswith("error: ") and message in failed.stderr
