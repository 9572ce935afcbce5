"""The contract on upstream's real sources: it holds at the pins, each entry notices a change."""

import ast

import pytest
from rehearsal import ROOT, run_python

from mindspeed_qerl.ascend.contract import ENTRIES, PINS, compare, definitions


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


@pytest.mark.parametrize("file", ENTRIES)
def test_each_entry_notices_a_change_and_a_removal(file, upstream, tmp_path):
    """Of what it names and of nothing else; the copy has no comments and another layout."""
    package = file.split("/")[0].replace("cli", "mindspeed_rl")
    source = (upstream / PINS[package].title / file).read_bytes()
    (tmp_path / file).parent.mkdir(parents=True)

    def changes(change, name):
        module = ast.parse(source)
        change(module, name)
        (tmp_path / file).write_text(ast.unparse(module))
        findings = compare(tmp_path, file)
        return {finding.name: finding.change for finding in findings if finding.change}

    assert changes(lambda module, name: None, "") == {}
    for name in ENTRIES[file]:
        # its class too
        around = [each for each in ENTRIES[file] if f"{name}.".startswith(f"{each}.")]
        around = dict.fromkeys(around, "changed")
        assert changes(change_code, name) == {**around, name: "changed"}
        if name:
            assert changes(rename, name) == {**around, name: "gone"}


def change_code(module, name):
    node = definitions(module, name)[-1] if name else module
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        node.value = ast.Constant("another")
    else:
        node.body.append(ast.parse("another()").body[0])


def rename(module, name):
    for node in definitions(module, name):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            target.id = "another"
        else:
            node.name = "another"
