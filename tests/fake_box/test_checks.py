"""The cases of cases.py through the real preflight, in fake boxes: cases that do not touch each
other share one.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.fake_box import OF_THE_HOST, Box, left_over, run, why_not
from tests.fake_box.broken_files import half, packed_test_split, pointers
from tests.fake_box.cases import EIGHT, ON_TWO, PAIR, PREFLIGHT, SEVEN, THIRTY, TWELVE, Case
from tests.fake_box.prepared import prepare
from tests.preflight.test_machine import by_name

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
HEALTHY = Case("", "", "", "")
BOXES = []  # cases that share one


def together(one, other):
    """Whether two cases can be in one box: other checks, other parts of the box and of the shell,
    nothing that changes the whole command, and one of them at most with files of its own.
    """
    if (one.config, one.options) != (other.config, other.options) or one.alone or other.alone:
        return False
    checks = {one.check, *one.besides} & {other.check} | {other.check, *other.besides} & {one.check}
    fields = set(one.changes()) & set(other.changes())
    return not (
        checks or fields or one.shell.keys() & other.shell.keys() or one.files and other.files
    )


for case in PREFLIGHT:
    box = next((box for box in BOXES if all(together(case, other) for other in box)), None)
    if box is None:
        BOXES.append(box := [])
    box.append(case)


def joined(cases):
    """The box, the shell and the files of all of them."""
    first = cases[0]
    changes = {name: value for case in cases for name, value in case.changes().items()}
    return replace(
        first,
        box=replace(Box(), **changes),
        shell={name: value for case in cases for name, value in case.shell.items()},
        before="\n".join(case.before for case in cases if case.before),
        files=next((case.files for case in cases if case.files), None),
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """config -> what it reads, made once."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp("files") / "of"
        return prepare(name, folder, 2 if name == PAIR else 1)

    return get


def broken(case, folder):
    """Files of its own for a case that breaks them."""
    files = prepare(case.config, folder)
    model = Path(files["MODELS"]) / "Qwen3-30B-A3B"
    case.files(model, model.with_name("Qwen3-30B-A3B-tp1-pp1-ep16"), Path(files["DATA"]) / "gsm8k")
    return files


def preflight(case, folder, files, *options):
    """Each check of the real tools/preflight.py in the box of a case, by name."""
    tool = ["python", "tools/preflight.py", "--config-name", case.config, "--json", *case.options]
    done = run(
        case.box,
        ["bash", "-c", f'{case.before}\nexec "$@"', "bash", *tool, *options],
        folder,
        {"PATH": "/usr/bin:/bin", "HOME": str(folder), **files, **case.shell},
        sourced=True,
        timeout=400,
    )
    assert done.stdout and "Traceback" not in done.stdout + done.stderr, done.stderr
    checks = by_name(done.stdout)
    assert not [check for check in checks.values() if "could not be checked" in check["found"]]
    return checks


def wrong(checks):
    return {
        name: check["state"]
        for name, check in checks.items()
        if check["state"] not in ("passed", "skipped") and name not in OF_THE_HOST
    }


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(cases, id=cases[0].done, marks=[] if len(cases) > 4 else pytest.mark.full)
        for cases in BOXES
    ],
)
def test_a_broken_box(cases, prepared, tmp_path):
    case = joined(cases)
    files = broken(case, tmp_path / "files") if case.files else prepared(case.config)
    checks = preflight(case, tmp_path / "box", files)
    allowed = {name for each in cases for name in (each.check, *each.besides)}
    assert wrong(checks).keys() <= allowed, wrong(checks)
    for each in cases:
        check = checks[each.check]
        assert check["state"] == each.state and each.found in check["found"], (each.done, check)
        assert check["fix"] or each.state == "passed", (each.done, check)


MASKED = {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    "box, config, shell",
    [
        (Box(), THIRTY, {}),
        (Box(mapped=12), TWELVE, {}),
        (EIGHT, SEVEN, {}),
        pytest.param(Box(dies=8), PAIR, {}, marks=pytest.mark.full),
        pytest.param(Box(), PAIR, MASKED, marks=pytest.mark.full),
    ],
    ids=["16", "12 mapped", "8", "2x8", "2x8 of 16"],
)
def test_healthy_boxes_pass_whole(box, config, shell, prepared, tmp_path):
    options = ON_TWO if config == PAIR else HEALTHY.options
    case = replace(HEALTHY, box=box, config=config, shell=shell, options=options)
    assert wrong(preflight(case, tmp_path, prepared(config))) == {}


def test_what_is_the_boxs_own(tmp_path):
    """Devices, network, processes, memory, /tmp and commands; what is left running is told, and
    gone with the box.
    """
    script = (
        "ls /dev | grep -c davinci[0-9]; cat /sys/fs/cgroup/memory.max; head -1 /proc/meminfo;"
        "command -v ip || echo no ip; echo mine > /tmp/of_the_box; sleep 600 & "
        "until grep -q sleep /proc/$!/comm; do :; done; exit 3"
    )
    box = Box(mapped=2, memory=10**12, cgroup={"memory.max": "99\n"}, without=("ip",))
    done = run(box, ["bash", "-c", script], tmp_path)
    assert done.returncode == 3, done
    assert " ".join(done.stdout.split()) == "2 99 MemTotal: 976562500 kB no ip"
    assert left_over(tmp_path) == ["sleep 600"] and not Path("/tmp/of_the_box").exists()


@pytest.mark.full
def test_what_is_needed_later_fails_only_then(tmp_path):
    """Weights that are pointers, or half, are a warning while the base is converted, as it needs
    them no more.
    """
    for number, breaking in enumerate((pointers("weights"), half)):
        case = replace(HEALTHY, files=breaking)
        files = broken(case, tmp_path / str(number))
        assert wrong(preflight(case, tmp_path / "box", files)) == {"weights": "warning"}
        next(Path(files["MODELS"]).glob("*-ep16/latest_checkpointed_iteration.txt")).unlink()
        assert wrong(preflight(case, tmp_path / "box", files))["weights"] == "failed"


@pytest.mark.full
def test_an_overlap_that_is_meant(tmp_path):
    case = replace(HEALTHY, files=packed_test_split)
    files = broken(case, tmp_path / "files")
    meant = wrong(preflight(case, tmp_path / "box", files, "task.allow_overlap=true"))
    assert meant == {"train and test": "warning"}


# ---- Ray ----

HOLDER = """
import subprocess, sys, os
import ray
ray.init(address="local", num_cpus=100, resources={"NPU": 16}, include_dashboard=False, logging_level="ERROR")

@ray.remote(resources={"NPU": 12})
class Training:
    def ready(self): return True

held = Training.remote()
ray.get(held.ready.remote())
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
print(os.getpid(), flush=True)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@pytest.mark.full
def test_a_ray_in_which_another_job_holds_npus(prepared, tmp_path):
    (tmp_path / "holder.py").write_text(HOLDER)
    tool = ["tools/preflight.py", "--config-name", THIRTY, "--json"]
    done = run(
        Box(),
        ["python", str(tmp_path / "holder.py"), *tool],
        tmp_path / "box",
        {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **prepared(THIRTY)},
        sourced=True,
    )
    pid, _, output = done.stdout.partition("\n")
    checks = by_name(output)
    assert wrong(checks) == {"ranks": "failed", "Ray": "failed"}, done.stdout
    words = f"of which 4 are free; the others are held by process {pid}"
    assert words in checks["Ray"]["found"] and "holder.py" in checks["Ray"]["found"]
    assert "Ray 4. Lost at Ray" in checks["ranks"]["found"]
