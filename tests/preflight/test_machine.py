"""The table of npu-smi, the command, and the real machine."""

import getpass
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict

import psutil
import pytest

from mindspeed_qerl import emulation
from mindspeed_qerl.ascend.resume import conversion_command
from mindspeed_qerl.preflight import preflight
from mindspeed_qerl.preflight.case import FAILED, PASSED
from mindspeed_qerl.preflight.machine import CGROUPS, LateError, Machine, ProbeError
from mindspeed_qerl.preflight.npus import CANN_PROBE, read_table, see_npus
from mindspeed_qerl.recipe.reader import read
from tests import ROOT
from tests.preflight.conftest import GROUPS, INSTALLED, NAME, Box, not_passed, npu_smi, said

# ---- npu-smi ----


# Of public reports: 910C, 910B (vllm-ascend issue 1130) and 26.0 (issue 12980).
FORMS = {
    "910C": (
        npu_smi(2, health={0: "Alarm"}, used={1: 31877}),
        [(0, "Alarm", 3416, 65536), (1, "OK", 31877, 65536)],
    ),
    "910B": (
        """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 5     910B2               | OK            | 96.4        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3397 / 65536         |
""",
        [(5, "OK", 3397, 65536)],
    ),
    "26.0, with processes": (
        """\
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     8                   | 0000:9D:00.0  | 0                    0    / 0                31877/ 65536            |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       0                 | 632268        | python3.1          | 197                   | NA                      |
""",
        [(8, "OK", 31877, 65536)],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_npu_smi(form):
    table, expected = FORMS[form]
    assert [tuple(asdict(die).values()) for die in read_table(table)] == expected


# ---- the table and the command ----


def by_name(output):
    return {check["name"]: check for check in json.loads(output)["checks"]}


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("preflight_tool", ROOT / "tools" / "preflight.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)

    def call(box, *arguments):
        monkeypatch.setattr(loaded, "Machine", lambda: box)
        monkeypatch.setattr(sys, "argv", ["preflight.py", *arguments])
        return loaded.main()

    return call


@pytest.fixture
def of_files(template, monkeypatch):
    """The shell's MODELS and DATA, and the override of run.root."""
    monkeypatch.setenv("MODELS", str(template[0] / "models"))
    monkeypatch.setenv("DATA", str(template[0] / "data"))
    return ("--config-name", NAME, f"run.root={template[0] / 'runs'}")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((NAME[:-1],), "did you mean"),
        (
            (NAME, "actor_config.tensor_model_parallel_size=3", "--print-conversion"),
            "32 attention heads cannot be divided by TP 3; .*plan_layout.py",
        ),
        ((NAME, "actor_config.load=null", "--print-conversion"), "actor_config.load is not set"),
    ],
)
def test_what_is_refused_before_anything_is_checked(of_files, tool, capsys, arguments, said):
    with pytest.raises(SystemExit) as refused:
        tool(Box(), "--config-name", *arguments)
    output, complaint = capsys.readouterr()
    assert refused.value.code == 2 and output == ""
    assert re.search(said, complaint, re.MULTILINE), complaint


def test_the_command(ready, of_files, tool, capsys):
    assert tool(Box(), *of_files) == 0
    assert tool(Box(left=0.06), *of_files) == 0  # a warning is none
    capsys.readouterr()
    assert tool(Box(acl=15), *of_files) == 1
    output = capsys.readouterr().out
    for group in GROUPS:
        assert re.search(rf"^│ {group} ", output, re.MULTILINE)
    assert output.rstrip().splitlines()[-1].startswith("2 failed, 1 warning, ")
    assert "--accept NAME (one of cann); the run directory records it" in output
    tool(Box(acl=15), *of_files, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["config"] == NAME and told["summary"].startswith("2 failed")
    assert next(check for check in told["checks"] if check["state"] == FAILED)["name"] == "ranks"
    assert set(told["checks"][0]) == {"name", "state", "found", "fix", "group"}
    tool(Box(), *of_files, "actor_config.load=/nowhere")  # a command to type is one line
    command = shlex.join(conversion_command(read(ready)[0])).replace(
        ready["actor_config"]["load"], "/nowhere"
    )
    assert f"CUDA_DEVICE_MAX_CONNECTIONS=1 {command}" in capsys.readouterr().out
    assert tool(Box(), *of_files, "--print-conversion") == 0
    assert shlex.split(capsys.readouterr().out) == conversion_command(read(ready)[0])


def test_a_check_that_breaks_is_a_failed_line(ready):
    def broken(**_):
        raise RuntimeError("no such thing")

    box = Box()
    box.may_listen = broken
    checks = {check.name: check for check in preflight(ready, NAME, box)}
    said(checks, "ports of HCCL", "be checked: RuntimeError: no such thing")
    assert checks["base weights"].state == PASSED


def test_checks_that_are_accepted(ready):
    box = Box(files={INSTALLED: "version=8.2.RC1"}, smi=npu_smi(16, health={3: "Alarm"}))
    names = ["canns-version", "npu-smi", "driver", "driverr", "config.json"]
    ready["run"]["accepted_checks"] = names
    *checks, first, second = preflight(ready, NAME, box)
    states = not_passed({check.name: check for check in checks})
    assert states == {"CANN's version": "accepted", "npu-smi": "accepted"}
    assert first.state == second.state == FAILED
    assert "accepted 'driverr', did you mean 'driver'" in first.found
    assert "accepted 'config.json'" in second.found  # the engine refuses it too


# ---- the real machine ----


@pytest.mark.parametrize(
    "files, room",
    [
        (
            {
                "memory.max": "9000000000\n",
                "memory.current": "8000000000\n",
                "memory.stat": "anon 5\ninactive_file 3000000000\n",
            },
            (4 * 10**9, "memory.max = 9.0 GB"),
        ),
        (
            {
                "memory/memory.limit_in_bytes": "64000000000",
                "memory/memory.usage_in_bytes": "63000000000",
            },
            (10**9, "memory/memory.limit_in_bytes = 64.0 GB"),
        ),
        # version 1 writes 2^63 for none
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5",
            },
            (10**12, "MemAvailable"),
        ),
    ],
    ids=["version 2", "version 1", "no limit"],
)
def test_cgroups(files, room, monkeypatch):
    machine, total = Machine(), type("Memory", (), {"available": 10**12})
    machine.read = lambda path: files.get(path.removeprefix(f"{CGROUPS}/"), "")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: total)
    assert machine.memory() == room


def test_the_tool_on_this_machine(of_files):
    """A process of its own, in a Python that has imported nothing: no torch is imported, and it
    ends whatever this machine lacks.
    """
    program = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\ntry:\n    runpy.run_path(sys.argv[0], "
        "run_name='__main__')\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "tools/preflight.py", *of_files, "--own-ray", "--json"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = by_name(done.stdout)
    failures = [check for check in told.values() if check["state"] == FAILED]
    assert done.returncode == bool(failures) and "Assertion" not in done.stderr, done.stderr
    for name in ("config.json", "test rows", "base weights"):
        assert told[name]["state"] == PASSED
    assert not any("could not be checked" in check["found"] for check in told.values())


def test_the_fake_answers_what_the_machine_answers():
    public = {name for name in dir(Machine) if not name.startswith("_")}
    assert public <= set(dir(Box()))


def test_this_machine(tmp_path):
    machine, nowhere = Machine(), tmp_path / "not" / "made" / "yet"
    assert machine.user() == getpass.getuser()
    disk = machine.disk(nowhere)
    assert 0 < disk.free < disk.total == machine.disk(tmp_path).total
    assert machine.may_execute(tmp_path) and machine.writable(nowhere)
    assert machine.opens("/dev/null") and not machine.opens("/dev/no-such")
    assert machine.version("pytest") == pytest.__version__
    assert machine.version("no-such-package") is None
    (tmp_path / "file").write_text("text")
    assert machine.glob(f"{tmp_path}/fi*") == [f"{tmp_path}/file"]
    assert machine.read(f"{tmp_path}/file") == "text" and machine.read("/no/such") == ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not machine.may_listen(port=port) and machine.listens(f"127.0.0.1:{port}")
    assert machine.may_listen(port=port) and not machine.listens(f"127.0.0.1:{port}")
    assert machine.may_listen("localhost") and not machine.may_listen("192.0.2.1")  # RFC 5737
    assert "127.0.0.1" in machine.interfaces()["lo"]


def test_processes_of_this_machine(tmp_path):
    program = shutil.copy(shutil.which("sleep"), tmp_path / "of-this-test")
    process = subprocess.Popen([program, "600"])
    try:
        assert Machine().runs("of-this-test")
    finally:
        process.kill()
    # it has ended, and still is in the table of processes
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(process.pid) and not Machine().runs("of-this-test")
    process.wait()


@pytest.mark.full
def test_a_real_ray_of_twelve(monkeypatch):
    import ray

    options = dict(include_dashboard=False, logging_level="ERROR")
    ray.init(address="local", num_cpus=3, resources={"NPU": 12}, **options)
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        cluster = see_npus(Machine(), own_ray=False).ray
    finally:
        ray.shutdown()
    assert (cluster["resources"]["NPU"], cluster["resources"]["CPU"]) == (12, 3)
    assert cluster["nodes"] == 1


def test_the_emulations_acl_is_asked():
    environment = {**os.environ, **emulation.environment(16)}
    output = Machine().run([sys.executable, "-c", CANN_PROBE], environment=environment)
    assert output.splitlines()[-1] == "answer 16"


def test_a_command_that_hangs_is_cut(tmp_path):
    """With the process that it started and that keeps its output open."""
    program = f"sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(LateError, match="sh: no answer within 0.5 s"):
        Machine().run(["sh", "-c", program], timeout=0.5)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "child").read_text()))
        psutil.wait_procs([child], timeout=10)
        state = child.status()
        child.kill()
        assert state == psutil.STATUS_ZOMBIE  # it has ended, and nobody has waited for it


def test_a_command_that_fails_says_why():
    with pytest.raises(ProbeError, match="sh: exit 3: the reason"):
        Machine().run(["sh", "-c", "echo the reason >&2; exit 3"])
    with pytest.raises(ProbeError, match="no-such-command is not installed here"):
        Machine().run(["no-such-command"])
