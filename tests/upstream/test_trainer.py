"""trainer_cases.py with upstream's code on the path."""

from rehearsal import HERE, emulated, run_python


def test_what_the_trainer_selects(upstream):
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = run_python([*pytest, HERE / "trainer_cases.py"], emulated(upstream))
    assert done.returncode == 0 and "14 passed" in done.stdout, (
        done.stdout[-5000:] + done.stderr[-2000:]
    )
