import io
import math
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import numpy
import pytest

from mindspeed_qerl.runs import plots
from mindspeed_qerl.runs.metrics import MetricsWriter, read_columns
from mindspeed_qerl.runs.report import write_report

pytest.importorskip("matplotlib")
ALL_PLOTS = ["exploration.png", "learning.png", "mismatch.png", "noise.png", "time.png"]


def report(run):
    """(what the terminal shows, summary.md, names of the pictures); a warning of matplotlib or
    numpy is an error.
    """
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as terminal:
        warnings.simplefilter("error")
        write_report(run)
    return (
        terminal.getvalue(),
        run.summary_file.read_text(),
        sorted(path.name for path in run.plots_dir.iterdir()),
    )


def pixels(png, color):
    """Number of pixels of a colour like "#0072B2"."""
    from matplotlib.image import imread

    image = (imread(png)[..., :3] * 255).round().astype(int)
    return int(
        (abs(image - [int(color[k : k + 2], 16) for k in (1, 3, 5)]).max(axis=-1) <= 2).sum()
    )


def test_summary_is_what_the_files_say(made_run):
    run = made_run(20)
    terminal, summary, pictures = report(run)
    for label, said in {
        "state": "finished",
        "steps": "20",
        "held-out accuracy, first": "0.250 ± 0.020 (standard error) at step 0",
        "held-out accuracy, last": "0.750 ± 0.030 (standard error) at step 20",
        "held-out accuracy, best": "0.750 ± 0.030 (standard error) at step 20",
        "training reward": "0.275 in the first step, 0.750 in the last",
        "k3": "mean 1.05e-11, largest 2.00e-11 nats per token",
        "syncs with noise on": "18 of 20",
        "noisy layers per sync": "5",
        # 9 s and 19 x 0.3 s of 20.3 s; 20 x 0.2; 20 x 0.01; 20 x 0.05; 0.4 s of one evaluation
        "rollout": "0.735 s per step (72%)",
        "update": "0.2 s per step (20%)",
        "sync": "0.01 s per step (1%)",
        "other": "0.05 s per step (5%)",
        "eval": "0.02 s per step (2%)",
        "a step": "1.02 s",
    }.items():
        assert f"| {label} | {said} |" in summary
        assert re.search(rf"{label} +{re.escape(said)}", terminal)
    for row in ("1 3-4 5.00e-02 5.05e-02 100.0%", "9 19-20 5.00e-04 5.05e-04 100.0%"):
        assert f"| {row.replace(' ', ' | ')} |" in summary and row.split() in [
            line.split() for line in terminal.splitlines()
        ]
    assert len(re.findall(r"\| \d+-\d+ \|", summary)) == 10
    assert "Warning" not in summary and pictures == ALL_PLOTS
    for picture in re.findall(r"!\[.*\]\((.*)\)", summary):
        assert (run.path / picture).is_file()


def test_a_killed_run_gets_its_report(run_killed):
    run = run_killed(
        "writer = MetricsWriter(run, tensorboard=False)\n"
        "writer.log_eval(0, {'accuracy': 0.25, 'interval_low': 0.2, 'interval_high': 0.3})\n"
        "for step in (1, 2):\n"
        "    writer.log(step, {'reward/mean': 0.5, 'time/step': 1.0, 'time/rollout': 0.6})\n"
        "open(run.metrics_file, 'a').write('{\"step\": 3, \"rew')\n"
    )
    terminal, summary, pictures = report(run)
    for line in (
        "state | running, or killed",
        "steps | 2",
        "training reward | 0.500 in the first step, 0.500 in the last",
        "rollout | 0.6 s per step (60%)",
        "other | 0.4 s per step (40%)",
        "eval | 0 s per step (0%)",
    ):
        assert f"| {line} |" in summary
    assert "running, or killed" in terminal
    assert pictures == ["learning.png", "time.png"]


def test_a_failed_run_says_why(made_run):
    run = made_run(0, ended=False)
    run.fail("rank 1 was killed | no memory\nleft")
    terminal, summary, _ = report(run)
    assert "failed: rank 1 was killed | no memory" in terminal
    assert "failed: rank 1 was killed \\| no memory<br>left |" in summary


@pytest.mark.parametrize(
    ("steps", "aqn", "expected"),
    [
        (0, True, ["learning.png"]),
        (30, False, ["exploration.png", "learning.png", "mismatch.png", "time.png"]),
        (130, True, ALL_PLOTS),
    ],
)
def test_pictures_of_short_and_long_runs(made_run, steps, aqn, expected):
    run = made_run(steps, aqn=aqn)
    run.plots_dir.mkdir()
    (run.plots_dir / "noise.png").write_bytes(
        b"of an earlier report"
    )  # must go where there is no noise to show
    _, _, pictures = report(run)
    assert pictures == expected
    assert pixels(run.plots_dir / "learning.png", plots.RED) > 50
    if steps:
        assert pixels(run.plots_dir / "learning.png", plots.BLUE) > 10
        assert pixels(run.plots_dir / "mismatch.png", plots.RED) > 10
        assert pixels(run.plots_dir / "time.png", plots.PART_COLORS["rollout"]) > 1000
    if steps > 1 and aqn:
        assert pixels(run.plots_dir / "noise.png", plots.ORANGE) > 50


def test_what_some_runs_alone_measure_is_said(new_run):
    """Routes of two layers, 9 and 10, of which one differs; a format's error; LoRA; an evaluation
    of one problem, which has no interval. Step 3 trains nothing, so it replays nothing.
    """
    run = new_run()
    with MetricsWriter(run, tensorboard=False) as writer:
        for step, share in ((1, 0.0), (2, 0.02), (3, None), (4, 0.06)):
            row = {
                "quantization/weight_error": 0.09,
                "time/step": 1.0,
            }
            if share is not None:
                row |= {"routing/replayed_tokens": 1000, "routing/flipped": share}
                row |= {"routing/flipped/layer_9": 0.0, "routing/flipped/layer_10": 2 * share}
            writer.log(step, row)
        writer.log_eval(0, {"accuracy": 1.0, "standard_error": math.nan})
    run.record(
        engine_start_seconds=125.0,
        lora={"linear_qkv": {"modules": 2, "parameters": 12288}},
        lora_movement={"linear_qkv": {"moved": 0.0123, "expected": 0.0123}},
    )
    terminal, summary, pictures = report(run)
    assert "routing.png" in pictures and pixels(run.plots_dir / "routing.png", plots.BLUE) > 10
    for label, said in {
        "held-out accuracy, last": "1.000 at step 0",
        "routes replayed": "3,000 tokens",
        "experts not the trainer's own": "mean 2.67%, largest 6.00% of the choices",
        "relative error of quantised weights": "mean 0.09",
        "engine start": "2 min 5 s",
        "linear_qkv": "2 modules, 12,288 parameters",
        "linear_qkv in the rollout engine": "moved 0.0123 of 0.0123",
    }.items():
        assert f"| {label} | {said} |" in summary and label in terminal


def test_a_run_with_nothing_logged_gets_a_summary(new_run):
    terminal, _, pictures = report(new_run())
    assert "running, or killed" in terminal
    assert pictures == []


def test_pictures_draw_the_values_of_the_files(made_run):
    run = made_run(20)
    columns, evals = read_columns(run.metrics_file), read_columns(run.eval_file)
    reward, accuracy = plots.learning(columns, evals).axes
    expected = numpy.column_stack([columns["step"], columns["reward/mean"]])
    numpy.testing.assert_array_equal(reward.lines[0].get_xydata(), expected)
    for shift in (0, -1):  # the mean of a user's own reward is no fraction
        for name in ("accuracy", "interval_low", "interval_high"):
            evals[name] = [value + shift for value in evals[name]]
        *_, accuracy = plots.learning(columns, evals).axes
        points = [(0, 0.25 + shift), (20, 0.75 + shift)]
        numpy.testing.assert_array_equal(accuracy.lines[0].get_xydata(), points)
        bars = [segment[:, 1] for segment in accuracy.collections[0].get_segments()]
        ends = numpy.column_stack([evals["interval_low"], evals["interval_high"]])
        numpy.testing.assert_allclose(bars, ends)
        texts = [text.get_text() for text in accuracy.texts]
        assert texts == [f"{0.25 + shift:.3f}", f"{0.75 + shift:.3f}"]
        assert accuracy.get_ylim()[0] < min(0, 0.25 + shift)

    nominal, measured = (line.get_ydata() for line in plots.noise(columns).axes[0].lines)
    sigmas = [sigma or math.nan for sigma in columns["aqn/sigma"]]
    numpy.testing.assert_array_equal(nominal, sigmas)
    numpy.testing.assert_array_equal(measured, [std for std in columns["aqn/measured_std"] if std])

    areas = plots.time_per_part(columns, evals).axes[0].collections
    tops = {round(x + 0.01): y for x, y in areas[-1].get_paths()[0].vertices if x % 1}
    steps = numpy.array(columns["time/step"])
    steps[19] += 0.4  # the evaluation
    assert max(tops.values()) == pytest.approx(steps[0])
    assert tops[21] == pytest.approx(steps[19])


def test_long_runs_show_a_moving_mean():
    values = numpy.random.default_rng(0).normal(size=500)
    columns = {"step": list(range(1, 501)), "reward/mean": list(values)}
    raw, mean = plots.learning(columns, {"step": []}).axes[0].lines
    numpy.testing.assert_array_equal(raw.get_ydata(), values)
    # 500 // 40 = 12 to each side
    expected = [values[max(0, k - 12) : k + 13].mean() for k in range(500)]
    numpy.testing.assert_allclose(mean.get_ydata(), expected, atol=1e-12)


def test_values_that_a_log_axis_cannot_show(new_run):
    run = new_run()
    off = {"aqn/sigma": 0.0, "aqn/expected_std": 0.0, "aqn/stage": 0}
    with MetricsWriter(run, tensorboard=False) as writer:
        for step in (1, 2):
            writer.log(
                step,
                {"mismatch/k1": -1e-3 if step == 1 else 0.0, "mismatch/k3": 0.0} | off,
            )
    report(run)
    kl = plots.mismatch(read_columns(run.metrics_file)).axes[0]
    assert [tuple(line.get_ydata()) for line in kl.lines] == [
        (1e-3,)
    ]  # |k1| of step 1; zeros have no place
    (sentence,) = plots.noise(read_columns(run.metrics_file)).axes[0].texts
    assert sentence.get_text() == "noise off at every step"


def test_results_that_only_look_fine_are_called_out(new_run):
    run = new_run()
    with MetricsWriter(run, tensorboard=False) as writer:
        for step in (1, 2):
            writer.log(
                step,
                {
                    "reward/mean": 0.0,
                    "loss/total": math.nan if step == 2 else 1.0,
                    "aqn/sigma": 5e-4,
                    "aqn/expected_std": 5e-4,
                    "aqn/stage": 9,
                    "aqn/layers": 0,
                    "aqn/measured_std": 2e-5,
                },
            )
    terminal, summary, _ = report(run)
    assert summary.count("> **Warning:** ") == 4
    for says in (
        "loss/total was NaN or infinite, first in step 2",
        "reward was 0 at every step",
        "put noise on no layer",
        "AQN stage 9: the measured std 2.0e-05 is far below the nominal one, 5.0e-04",
    ):
        assert re.search(rf"> \*\*Warning:\*\* .*{re.escape(says)}", summary), says
    assert terminal.count("Warning:") == 4


def test_the_command_writes_the_report_again_without_torch(made_run):
    run = made_run(3)
    # An entry of None in sys.modules makes `import torch` fail.
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "runpy.run_module('mindspeed_qerl.runs.report', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Report:" in done.stdout
    assert sorted(path.name for path in run.plots_dir.iterdir()) == ALL_PLOTS


def test_the_command_explains_what_is_wrong(made_run):
    run = made_run(2)
    run.metrics_file.write_text("{}}\n" + run.metrics_file.read_text())
    for wrong, says in (
        (run.path, "metrics.jsonl:1: damaged line"),
        (Path("no/such/run"), "no/such/run is not a run directory"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mindspeed_qerl.runs.report", str(wrong)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert says in done.stderr
        assert "Traceback" not in done.stderr
