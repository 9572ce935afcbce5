"""The table of npu-smi, the command, and the real machine."""

import getpass
import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from mindspeed_qerl import emulation
from mindspeed_qerl.ascend.contract import PINS, Finding, Report
from mindspeed_qerl.ascend.convert import conversion_command
from mindspeed_qerl.preflight import FAILED, GROUPS, PASSED, TABLE, WARNING, preflight
from mindspeed_qerl.preflight.asking import CANN_PROBE, see_npus
from mindspeed_qerl.preflight.case import case_of
from mindspeed_qerl.preflight.machine import Machine, ProbeError, cgroup_room, cgroup_threads
from mindspeed_qerl.preflight.npus import cann
from mindspeed_qerl.preflight.smi import read_table
from mindspeed_qerl.preflight.table import markdown
from mindspeed_qerl.recipe.reader import read
from tests.preflight.conftest import (
    HEAD,
    NAME,
    NO_NPU,
    TAIL,
    Box,
    look,
    not_passed,
    npu_smi,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
TWELVE = ",".join(map(str, range(12)))


# ---- npu-smi ----


def test_npu_smi_of_a_910c():
    dies, held = read_table(npu_smi(16, health={3: "Alarm"}, used={15: 31877}))
    assert [(die.card, die.chip) for die in dies] == [(i // 2, i % 2) for i in range(16)]
    assert [die.health for die in dies] == ["OK"] * 3 + ["Alarm"] + ["OK"] * 12
    assert (dies[15].used, dies[15].total) == (31877, 65536) and held == {}


# First lines and dies of public reports: 910B (vllm-ascend issue 1130), 26.0 (issue 12980), 310P on
# 24.1 (Ascend/pytorch issue 94), 310P and 310B on 23.0, and others in their manner.
FORMS = {
    "910B": (
        HEAD.replace("Chip  Phy-ID", "Chip        ")
        + """\
| 0     910B2               | OK            | 96.4        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3397 / 65536         |
"""
        + TAIL,
        (0, 0, 0, "OK", 3397, 65536),
        [],
    ),
    "26.0, one more column of processes": (
        """\
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     8                   | 0000:9D:00.0  | 0                    0    / 0                31877/ 65536            |
+---------------------------+---------------+----------------------------------------------------------------------+
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    | Process id in container |
+===========================+===============+======================================================================+
| 0       0                 | 632268        | python3.1          | 197                   | NA                      |
""",
        (0, 0, 8, "OK", 31877, 65536),
        ["python3.1 (process 632268, 197 MB)"],
    ),
    "310P, Device, no HBM, no processes": (
        """\
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 1792    310P3                 | OK              | NA           36                0     / 0             |
| 1       1                     | 0000:07:00.0    | 0            1041 / 43693                            |
""",
        (1792, 1, 1, "OK", 1041, 43693),
        None,
    ),
    "narrow, a title that is cut": (
        """\
| NPU   Name   | Health      | Power(W)  Temp(C)           Hugepages-Usage(page|
| Chip  Device | Bus-Id      | AICore(%) Memory-Usage(MB)                      |
| 64    310P3  | OK          | NA        48                0     / 0           |
| 0     1      | NA          | 0         1764 / 21527                          |
""",
        (64, 0, 1, "OK", 1764, 21527),
        None,
    ),
    "910A, both memories, colours": (
        """\
| NPU   Name  | Health  | Power(W)   Temp(C)   Hugepages-Usage(page) |
| Chip        | Bus-Id  | AICore(%)  Memory-Usage(MB)  HBM-Usage(MB) |
| 3     910A  | \x1b[32mok\x1b[0m | 65.7  36  0 / 0 |
| 0           | 0000:C1:00.0 | 0   591  / 15137   0 / 32768 |
| NPU     Chip              | Process id    | Process name       | Process memory(MB)    |
| 3       0                 | 7             |                    | 50128                 |
""",
        (3, 0, 3, "ok", 0, 32768),
        ["a process (process 7, 50128 MB)"],
    ),
    "a name of digits, one with a space, no memory": (
        """\
| NPU   Name       | Health          | Power(W)   Temp(C)  |
| Chip             | Bus-Id          | AICore(%)           |
| 5     Ascend 310 | General Warning | 12.8       43       |
| 0                | 0000:85:00.0    | 0                   |
| NPU     Chip     | Process id      | Process name  | Process memory(MB) |
| No running processes found in NPU 5 |
""",
        (5, 0, 5, "General Warning", 0, 0),
        [],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_npu_smi(form):
    table, expected, processes = FORMS[form]
    [die], held = read_table(table)
    assert tuple(asdict(die).values()) == expected
    assert held == (None if processes is None else {expected[2]: processes} if processes else {})


def test_no_form_of_npu_smi_breaks_the_preflight():
    """Columns and rows taken away, one at a time, from every form: what is left is read, or not."""
    for table, *_ in FORMS.values():
        lines = table.splitlines()
        for number, line in enumerate(lines):
            cells = line.split("|")
            for place in range(len(cells)):
                fewer = "|".join(cells[:place] + cells[place + 1 :])
                read_table("\n".join([*lines[:number], fewer, *lines[number + 1 :]]))
        for title in re.findall(r"[A-Z][\w-]+", table):
            read_table(table.replace(title, ""))
    assert read_table("nothing of the kind") == read_table("") == ([], None)


# ---- the table and the command ----


def section(name: str) -> str:
    """What stands between two comments of the page on troubleshooting."""
    text = PAGE.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"<!-- {name}: end -->")[0]


def test_the_page_has_every_check():
    """python -m mindspeed_qerl.preflight.table prints it."""
    assert section("checks").strip() == markdown()
    assert len(markdown().splitlines()) == len(TABLE) + 2


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("preflight_tool", ROOT / "tools" / "preflight.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)

    def call(box, *arguments: str) -> int:
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
    ("arguments", "said"),
    [
        ((f"{NAME[:-1]}",), "did you mean"),
        ((NAME, "no_such.key=1"), "did you mean|no_such"),
        ((NAME, "--nodes", "0"), "at least 1"),
        ((NAME, "engine=foo"), r"unknown engine 'foo'.* Known: local, mindspeed_rl"),
        ((NAME, "engine=null"), r"unknown engine 'None'.* Known: local, mindspeed_rl"),
        (
            ("../configs/grpo_tiny_moe_cpu",),
            r"unknown config name '../configs/grpo_tiny_moe_cpu', did you mean 'grpo_tiny_moe_cpu'",
        ),
        (
            (NAME, "actor_config.tensor_model_parallel_size=3", "--print-conversion"),
            "32 attention heads cannot be divided by TP 3; .*plan_layout.py",
        ),
        (
            (NAME, "actor_config.tensor_model_parallel_size=abc", "--print-conversion"),
            "actor_config.tensor_model_parallel_size = 'abc' must be",
        ),
        (
            (NAME, "megatron_training.tokenizer_name_or_path=null", "--print-conversion"),
            "tokenizer_name_or_path is missing",
        ),
        ((NAME, "actor_config.load=null", "--print-conversion"), "actor_config.load is not set"),
        (
            (NAME, "actor_config.expert_model_parallel_size=8", "--print-conversion"),
            r"tp1-pp1-ep16 is named after another layout .* EP 8.*load=\S+/Qwen3-30B-A3B-tp1-pp1-ep8$",
        ),
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
    assert tool(Box(limit=1024), *of_files) == 0  # a warning is none
    capsys.readouterr()
    assert tool(Box(acl=15), *of_files) == 1
    output = capsys.readouterr().out
    for group in GROUPS:
        assert re.search(rf"^│ {group} ", output, re.MULTILINE)
    assert output.rstrip().splitlines()[-1].startswith("2 failed, 1 warning, ")
    assert {len(line) for line in output.splitlines() if line.startswith(("┏", "│", "└"))} == {110}
    numbers = re.findall(r"(?:failed|warning) \[(\d+)\]", output)
    assert numbers and numbers == re.findall(r"^\[(\d+)\] ", output, re.MULTILINE)
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
    def broken(_):
        raise RuntimeError("no such thing")

    box = Box()
    box.port_free = broken
    checks = {check.name: check for check in preflight(ready, NAME, box)}
    assert checks["ports of HCCL"].state == FAILED
    assert "be checked: RuntimeError: no such thing" in checks["ports of HCCL"].found
    assert checks["base weights"].state == PASSED


def test_checks_that_are_accepted(ready):
    box = Box(cann="8.2.RC1", smi=npu_smi(16, health={3: "Alarm"}))
    names = ["canns-version", "npu-smi", "driver", "driverr", "rotary base"]
    ready["run"]["accepted_checks"] = names
    *checks, third, fourth, fifth = preflight(ready, NAME, box)
    states = not_passed({check.name: check for check in checks})
    assert states == {"CANN's version": "accepted", "npu-smi": "accepted"}
    assert third.found == "driver: accepted, and has not failed" and third.state == PASSED
    assert "unknown check 'driverr', did you mean 'driver'" in fourth.found
    assert "unknown check 'rotary-base'" in fifth.found and fifth.state == FAILED


# ---- upstream's sources ----


def test_upstream(ready):
    rl, llm, mindspeed, *others = Box().reports
    *others_than_vllm, vllm = Box().reports
    changed = Finding("mindspeed_rl/x.py", "f", "we call it", "changed", "")
    found = look(ready, Box())["upstream's sources"].found
    assert found == "MindSpeed-RL, MindSpeed-LLM, MindSpeed, Megatron-LM, vllm-ascend as pinned"
    check = look(ready, Box(reports=[llm, mindspeed, *others]))["upstream's sources"]
    assert check.state == FAILED and check.found == "cannot be imported here: MindSpeed-RL"
    assert "PYTHONPATH" in check.fix
    other = with_(mindspeed, content="another")
    checks = look(ready, Box(reports=[with_(rl, findings=[changed]), llm, other, *others]))
    assert not_passed(checks) == {"MindSpeed-RL": FAILED, "MindSpeed": WARNING}
    assert "the engine relies on are unchanged; changed mindspeed_rl/x.py f" in str(
        checks["MindSpeed-RL"]
    )
    assert "a checkout of the pin 05a90d7" in checks["MindSpeed-RL"].fix
    assert "(sha256:another), not the pin ac9f0e7" in checks["MindSpeed"].found
    # on emulated NPUs too
    gone = with_(vllm, content="another", findings=[changed])
    for raw, more in ((ready, {}), ({**ready, "emulate_npu": True}, NO_NPU)):
        box = Box(**more, reports=[*others_than_vllm, gone])
        assert not_passed(look(raw, box))["vllm-ascend"] == FAILED


def with_(report: Report, **values) -> Report:
    return type(report)(**{**vars(report), **values})


def test_the_versions_are_those_of_the_guide():
    guide = (ROOT / "docs" / "ascend.md").read_text()
    pins = {row.name: row.verdict.keywords["pin"] for row in TABLE if row.ask.startswith("Is it 2")}
    torch = pins["torch"]
    assert f"| torch, torch_npu | {torch} |" in guide and torch == pins["torch_npu"]


# ---- the real machine ----


def test_memory_cgroups():
    """Version 2 of a container that sees its own at the root, and of a slice of a machine; version
    1; none.
    """
    cache = "anon 5\ninactive_file 3000000000\n"
    files = {
        "/proc/self/cgroup": "0::/a.slice/b.scope\n",
        "/sys/fs/cgroup/a.slice/memory.max": "9000000000\n",
        "/sys/fs/cgroup/a.slice/memory.current": "8000000000\n",
        "/sys/fs/cgroup/a.slice/memory.stat": cache,
        "/sys/fs/cgroup/a.slice/b.scope/memory.max": "max\n",
        "/sys/fs/cgroup/memory.max": "7000000000\n",
        "/sys/fs/cgroup/memory.current": "1000000000\n",
    }
    assert cgroup_room(files.get) == {
        "/sys/fs/cgroup/a.slice/memory.max = 9.0 GB": 4 * 10**9,
        "/sys/fs/cgroup/memory.max = 7.0 GB": 6 * 10**9,
    }
    place = "/sys/fs/cgroup/memory/docker/x/memory"
    files = {
        "/proc/self/cgroup": "11:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/\n",
        f"{place}.limit_in_bytes": "64000000000",
        f"{place}.usage_in_bytes": "4000000000",
        f"{place}.stat": "inactive_file 1\ntotal_inactive_file 2000000000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    }
    assert cgroup_room(files.get) == {f"{place}.limit_in_bytes = 64.0 GB": 62 * 10**9}
    assert cgroup_room({}.get) == {}
    files |= {
        "/proc/self/cgroup": "8:pids:/docker/x\n0::/\n",
        "/sys/fs/cgroup/pids/docker/x/pids.max": "2048\n",
        "/sys/fs/cgroup/pids/pids.max": "max\n",
        "/sys/fs/cgroup/pids.max": "9000\n",
    }
    assert cgroup_threads(files.get) == {
        "/sys/fs/cgroup/pids/docker/x/pids.max": 2048,
        "/sys/fs/cgroup/pids.max": 9000,
    }


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
    told = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    failures = [check for check in told.values() if check["state"] == FAILED]
    assert done.returncode == bool(failures) and "Assertion" not in done.stderr, done.stderr
    for name in ("shape", "test rows", "base weights"):
        assert told[name]["state"] == PASSED
    assert not any("could not be checked" in check["found"] for check in told.values())


def test_the_fake_answers_what_the_machine_answers():
    public = {name for name in dir(Machine) if not name.startswith("_")}
    assert public <= set(dir(Box()))


def test_this_machine(tmp_path):
    machine, nowhere = Machine(), tmp_path / "not" / "made" / "yet"
    assert machine.run([sys.executable, "-c", "print('yes')"]) == "yes\n"
    assert 1 <= machine.cpus() <= os.cpu_count() and 1 <= machine.may_use() <= os.cpu_count()
    assert machine.open_files() > 0 and machine.user() == getpass.getuser()
    assert 0 < machine.threads()["kernel.threads-max"]
    assert machine.python_version == sys.version_info[:2]
    free = pytest.approx(machine.disk_free(tmp_path), rel=0.1)
    assert 0 < machine.disk_free(nowhere) == free and 0 < machine.disk_left(nowhere) < 1
    assert machine.may_execute(tmp_path) and machine.writable(nowhere)
    assert machine.closed("/dev/null") == "" and machine.closed("/dev/no-such") == "is not there"
    assert machine.version("pytest") == pytest.__version__
    assert machine.version("no-such-package") is None
    assert "pytest" in machine.entry_points("console_scripts")
    assert machine.importable("json") and not machine.importable("no_such_module")
    (tmp_path / "file").write_text("text")
    assert machine.glob(f"{tmp_path}/fi*") == [f"{tmp_path}/file"]
    assert machine.read(f"{tmp_path}/file") == "text" and machine.read("/no/such") is None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not machine.port_free(port) and machine.listens("127.0.0.1", port)
    assert machine.port_free(port) and not machine.listens("127.0.0.1", port)
    assert "127.0.0.1" in machine.interfaces()["lo"] and "127.0.0.1" in machine.addresses()
    available = pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert machine.memory()["MemAvailable"] == available
    assert all(report.pin in PINS.values() for report in machine.upstream())


def test_processes_of_this_machine():
    process = subprocess.Popen(["tail", "-f", "/dev/null"], env={"A_NAME": "of ours"})
    try:
        assert Machine().processes("tail")[process.pid] == {"A_NAME": "of ours"}
    finally:
        process.kill()
    # it has ended, and still is in the table of processes
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(process.pid) and process.pid not in Machine().processes("tail")
    process.wait()


@pytest.mark.full
def test_a_real_ray_of_twelve(monkeypatch):
    """Its raylet still has the list that it was started with."""
    import ray

    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", TWELVE)
    options = dict(include_dashboard=False, logging_level="ERROR")
    ray.init(address="local", num_cpus=3, resources={"NPU": 12}, **options)
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
        monkeypatch.setattr(Machine, "importable", lambda self, name: False)
        seen = see_npus(Machine())
    finally:
        ray.shutdown()
    assert (seen.ray["resources"]["NPU"], seen.ray["resources"]["CPU"]) == (12, 3)
    assert seen.ray["nodes"] == 1
    ending = f"was started with ASCEND_RT_VISIBLE_DEVICES={TWELVE}"
    assert any(line.endswith(ending) for line in seen.stale)


@pytest.mark.parametrize(
    ("acl", "words", "fix"),
    [
        ("class rt: get_device_count = lambda: (0, 507033)", "gives error 507033", ""),
        # a container without the driver's libraries
        (
            "raise ImportError('libascend_hal.so: cannot open shared object file')",
            "libascend_hal.so: cannot open shared object",
            "/usr/local/Ascend/driver",
        ),
    ],
)
def test_an_acl_that_fails(ready, tmp_path, monkeypatch, acl, words, fix):
    (tmp_path / "acl.py").write_text(acl)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = see_npus(Machine(), own_ray=True)
    check = cann(Machine(), with_(case_of(ready, NAME), seen=seen))
    assert words in check.found and fix in check.fix


def test_the_emulations_acl_is_asked():
    environment = {**os.environ, **emulation.environment(16)}
    output = Machine().run([sys.executable, "-c", CANN_PROBE], environment=environment)
    assert output.splitlines()[-1] == "devices 16"


def test_a_command_that_hangs_is_cut(tmp_path):
    """With the process that it started and that keeps its output open."""
    program = f"sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(ProbeError, match="sh: no answer within 0.5 s") as cut:
        Machine().run(["sh", "-c", program], timeout=0.5)
    assert cut.value.reason == "timeout"
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "child").read_text()))
        psutil.wait_procs([child], timeout=10)
        state = child.status()
        child.kill()
        assert state == psutil.STATUS_ZOMBIE  # it has ended, and nobody has waited for it


def test_a_command_that_fails_says_why():
    with pytest.raises(ProbeError, match="sh: exit 3: the reason"):
        Machine().run(["sh", "-c", "echo the reason >&2; exit 3"])
    with pytest.raises(ProbeError, match="no-such-command is not installed here") as missing:
        Machine().run(["no-such-command"])
    assert missing.value.reason == "missing"
