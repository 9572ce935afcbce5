"""The rows of docs/preflight.md through the real preflight, in fake boxes, as cases.py has them."""

import json
import time
from pathlib import Path

import pytest

from tests.fake_box import OF_THE_HOST, Box, run, why_not
from tests.fake_box.broken_files import config_says, half, packed_test_split, pointers
from tests.fake_box.cases import NODE, PAIR, PREFLIGHT, THIRTY, Case
from tests.fake_box.page import GROUPS, NOT_CAUGHT, OTHERS, PAGE, escape, seen
from tests.fake_box.prepared import prepare

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
FEW = {
    "hisi_hdc is not mapped",
    "HCCL_OP_EXPANSION_MODE=AIV",
    "the disk of /tmp is 96 % full",
    "libatb of the other C++ ABI",
    "base weights of a few bytes",
}  # in `make test` too


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """config -> what it reads, made once."""
    made = {}

    def get(name: str) -> dict[str, str]:
        if name not in made:
            made[name] = prepare(
                name, tmp_path_factory.mktemp("files") / "of", 2 if name == PAIR else 1
            )
        return made[name]

    return get


def broken(case: Case, folder: Path) -> dict[str, str]:
    """Files of its own for a case that breaks them."""
    files = prepare(case.config, folder)
    model = Path(files["MODELS"]) / "Qwen3-30B-A3B"
    case.files(model, model.with_name("Qwen3-30B-A3B-tp1-pp1-ep16"), Path(files["DATA"]) / "gsm8k")
    return files


def look(case: Case, folder: Path, files: dict[str, str], *options: str) -> tuple[int, str, str]:
    """Exit status and both outputs of the preflight in the box of a case."""
    line = f'{case.before}\nexec "$@"'
    done = run(
        case.box,
        [
            "bash",
            "-c",
            line,
            "bash",
            "python",
            "tools/preflight.py",
            "--config-name",
            case.config,
            *case.options,
            *options,
        ],
        folder,
        {"PATH": "/usr/bin:/bin", "HOME": str(folder), **files, **case.shell},
        sourced=True,
        timeout=200,
    )
    assert done.stdout and "Traceback" not in done.stdout + done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def preflight(case: Case, folder: Path, files: dict[str, str], *options: str) -> dict[str, dict]:
    """Each check of the real tools/preflight.py in that box, by name."""
    checks = {
        check["name"]: check
        for check in json.loads(look(case, folder, files, "--json", *options)[1])["checks"]
    }
    assert not [check for check in checks.values() if "could not be checked" in check["found"]]
    return checks


def wrong(checks) -> dict[str, str]:
    return {
        name: check["state"]
        for name, check in checks.items()
        if check["state"] not in ("passed", "skipped") and name not in OF_THE_HOST
    }


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.done, marks=[] if case.done in FEW else pytest.mark.full)
        for case in PREFLIGHT
    ],
)
def test_a_broken_box(case, prepared, tmp_path):
    files = broken(case, tmp_path / "files") if case.files else prepared(case.config)
    began = time.monotonic()
    checks = preflight(case, tmp_path / "box", files)
    check = checks[case.check]
    seen(case.done, f"{check['name']} {check['state']}: {check['found']}", began)
    assert check["state"] == case.state and case.found in check["found"], check
    assert case.fix in check["fix"], check
    assert wrong(checks).keys() <= {case.check, *case.besides}, wrong(checks)


def test_the_page_has_every_case():
    """80 at least, each once."""
    names = [*(case.done for case in PREFLIGHT), *OTHERS, *NOT_CAUGHT]
    assert len(names) == len(set(names)) >= 80
    rows = [
        line.split(" | ")[0].removeprefix("| ")
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| what")
    ]
    assert sorted(rows) == sorted(map(escape, names))
    assert {case.done for group in GROUPS.values() for case in group if isinstance(case, Case)} == {
        case.done for case in PREFLIGHT
    }


@pytest.mark.full
def test_two_healthy_nodes(prepared, tmp_path):
    files, options = prepared(PAIR), ("--nodes", "2", "--own-ray")
    healthy = Case("", "", "", "", box=NODE, config=PAIR, options=options)
    assert wrong(preflight(healthy, tmp_path / "eight", files)) == {}
    masked = Case(
        "",
        "",
        "",
        "",
        box=Box(etc=NODE.etc),
        config=PAIR,
        options=options,
        shell={"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
    )
    assert wrong(preflight(masked, tmp_path / "masked", files)) == {}


@pytest.mark.full
def test_what_is_needed_later_fails_only_then(tmp_path):
    """Weights that are pointers, or half, are a warning while the base is converted, as it needs
    them no more.
    """
    for number, breaking in enumerate((pointers("weights"), half)):
        case = Case("", "", "", "", files=breaking)
        files = broken(case, tmp_path / str(number))
        assert wrong(preflight(case, tmp_path / "box", files)) == {"weights": "warning"}
        next(Path(files["MODELS"]).glob("*-ep16/latest_checkpointed_iteration.txt")).unlink()
        assert wrong(preflight(case, tmp_path / "box", files))["weights"] == "failed"


@pytest.mark.full
def test_packed_prompts_of_the_test_split_without_a_tokenizer(tmp_path):
    """By their number; and as it may be meant."""
    case = Case("", "", "", "", files=packed_test_split)
    files = broken(case, tmp_path / "files")
    (Path(files["MODELS"]) / "Qwen3-30B-A3B" / "tokenizer.json").write_text("{}")
    checks = preflight(case, tmp_path / "box", files)
    assert wrong(checks) == {"train and test": "failed"} and checks["train and test"]["found"] == (
        "1,319 packed prompts, as many as there are test rows; train_chat.parquet has 7,473: they "
        "are not of one conversion"
    )
    assert wrong(preflight(case, tmp_path / "box", files, "task.allow_overlap=true")) == {
        "train and test": "warning"
    }


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
    files, began = prepared(THIRTY), time.monotonic()
    (tmp_path / "holder.py").write_text(HOLDER)
    done = run(
        Box(),
        [
            "python",
            str(tmp_path / "holder.py"),
            "tools/preflight.py",
            "--config-name",
            THIRTY,
            "--json",
        ],
        tmp_path / "box",
        {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **files},
        sourced=True,
    )
    pid, _, output = done.stdout.partition("\n")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks) == {"ranks": "failed", "Ray": "failed"}, done.stdout
    seen(
        "a Ray in which another job holds 12 of 16 NPUs",
        f"Ray failed: {checks['Ray']['found']}",
        began,
    )
    assert (
        "one is running with 16 NPUs, of which 4 are free; the others are held by process " + pid
        in checks["Ray"]["found"]
        and "holder.py" in checks["Ray"]["found"]
    )
    assert "4 of 16 asked for" in checks["ranks"]["found"]


# ---- accepted ----


@pytest.mark.full
def test_a_check_that_is_accepted(prepared, tmp_path):
    files, box = prepared(THIRTY), Box(cann="8.2.RC1", driver="24.1.0")

    def told(box: Box, *options: str) -> tuple[int, str]:
        status, output, _ = look(Case("", "", "", "", box=box), tmp_path / "box", files, *options)
        return status, output

    status, output = told(box)
    assert (
        status == 1
        and "--accept NAME, of canns-version, driver; the run directory keeps it" in output
    )
    status, output = told(box, "--accept", "CANN's version", "--accept", "driver")
    assert (
        status == 0
        and output.splitlines()[-1].startswith("2 accepted, ")
        and "8.2.RC1; MindSpeed" in output
    )
    status, output = told(box, "run.accepted_checks=[canns-version,nnal]")
    assert status == 1 and "1 failed, 1 accepted" in output.splitlines()[-1]
    assert "nnal: accepted, and has not failed" in output
    status, output = told(Box(), "--accept", "driverr")
    assert status == 1 and "unknown check 'driverr', did you mean 'driver'" in output
    assert told(Box(sick={3: "Alarm"}), "--accept", "npu-smi")[0] == 0


@pytest.mark.full
def test_what_the_engine_refuses_cannot_be_accepted(tmp_path):
    case = Case("", "", "", "", files=config_says(rope_theta=1e7))
    status, output, _ = look(
        case, tmp_path / "box", broken(case, tmp_path / "files"), "--accept", "rotary base"
    )
    assert status == 1 and "rotary-base cannot be accepted" in output
    assert output.splitlines()[-1].startswith("2 failed, ")
