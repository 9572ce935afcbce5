"""The contract on upstream's real sources: it holds at the pins, each entry notices a change."""

from rehearsal import ROOT, run_python

from mindspeed_qerl.ascend.contract import ENTRIES, PINS


def check_upstream(roots):
    arguments = [f"--{package.replace('_', '-')}={root}" for package, root in roots.items()]
    return run_python([ROOT / "tools" / "check_upstream.py", *arguments], {})


def test_everything_is_unchanged_at_the_pins(upstream):
    done = check_upstream({package: upstream / pin.title for package, pin in PINS.items()})
    assert done.returncode == 0, done.stdout + done.stderr
    for line, (package, pin) in zip(done.stdout.splitlines(), PINS.items(), strict=True):
        root = "cli" if package == "mindspeed_rl" else package
        entries = [ENTRIES[file] for file in ENTRIES if file.split("/")[0] in (package, root)]
        count = sum(map(len, entries))
        assert line.startswith(
            f"{pin.title} in {upstream / pin.title} is {pin}; {count} of {count}"
        )
