"""The real tools/preflight.py in fake boxes: what only real processes, mounts, ports and imports
show. tests/preflight plays all else.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from tests.fake_box import GB, Box, left_over, run, why_not
from tests.fake_box.prepared import prepare
from tests.preflight.test_machine import by_name

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
THIRTY, TWELVE, SEVEN = (
    "grpo_qwen3_30b_a3b_gsm8k_16npu",
    "grpo_qwen3_30b_a3b_gsm8k_12npu",
    "grpo_qwen25_7b_gsm8k_8npu",
)
PAIR = "grpo_qwen3_30b_a3b_gsm8k_2x8npu"
FAILED, WARNING = "failed", "warning"
# Checks that may follow from another's fault.
BESIDES = {"ranks", "Ray", "CANN", "npu-smi", "variables", "imports of a worker", "config.json"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """config -> what it reads, made once."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp("files") / "of"
        return prepare(name, folder)

    return get


def preflight(box, files, folder, config=THIRTY, shell=None, before="", options=("--own-ray",)):
    """Each check of the real tools/preflight.py in a box, by name."""
    tool = ["python", "tools/preflight.py", "--config-name", config, "--json", *options]
    done = run(
        box,
        ["bash", "-c", f'{before}\nexec "$@"', "bash", *tool],
        folder,
        {"PATH": "/usr/bin:/bin", "HOME": str(folder), **files, **(shell or {})},
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
        if check["state"] not in ("passed", "skipped")
    }


LISTENER = """exec python -c 'import os, socket, sys
listener = socket.create_server(("", 12347))
listener.set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" """
NOBODY = 'set -- unshare --user --map-user=4242 --map-group=4242 "$@"'
SHUT = (
    "touch /tmp/shut && chmod 0 /tmp/shut && mount --bind /tmp/shut /dev/davinci5; "
    'set -- setpriv --bounding-set=-dac_override,-dac_read_search "$@"'
)
NO_ACL = "export PYTHONPATH=$(tr : '\\n' <<< \"$PYTHONPATH\" | grep -v Ascend | paste -s -d :)"
NOEXEC = "mkdir /tmp/c && mount -t tmpfs -o noexec none /tmp/c"
READ_ONLY = "mkdir /tmp/ro && mount -t tmpfs -o ro,size=1M none /tmp/ro"
FULL = "mount -o remount,size=1M /tmp && head -c 1000K /dev/zero > /tmp/full"
POOR = Box(
    free=23 * GB,
    disk="10000000000",
    files={"/etc/hosts": f"127.0.0.1 localhost\n10.9.9.9 {os.uname().nodename}\n"},
)
FULL_CGROUP = {"memory.max": f"{400 * GB}", "memory.current": f"{380 * GB}"}
# what is done to a box, and what its checks say
BROKEN = {
    "npu-smi hangs": (
        dict(box=Box(smi_hangs=True)),
        {"npu-smi": (FAILED, "no answer within 20 s")},
    ),
    "a sick die": (
        dict(box=Box(sick={3: "Alarm"}), config=TWELVE),
        {"npu-smi": (FAILED, "of the first 12, which the run uses, davinci3")},
    ),
    "a device node of others": (
        dict(box=Box(), before=SHUT),
        {"/dev/davinci*": (FAILED, "cannot open /dev/davinci5")},
    ),
    "no acl": (dict(box=Box(), before=NO_ACL), {"CANN": (FAILED, "No module named 'acl'")}),
    "acl cannot start": (dict(box=Box(acl_error=507033)), {"CANN": (FAILED, "gives error 507033")}),
    "a Ray that is gone": (
        dict(box=Box(), shell={"RAY_ADDRESS": "127.0.0.1:1"}, options=()),
        {"Ray": (FAILED, "RAY_ADDRESS=127.0.0.1:1 cannot be joined: nothing listens there")},
    ),
    "a poor host": (
        dict(box=POOR),
        {
            "host memory": (FAILED, "16 ranks load 107 GB of base weights at once"),
            "disk for the run": (FAILED, "10.0 GB free"),
            "host name": (WARNING, "the name of no address"),
        },
    ),
    "a full container": (
        dict(box=Box(cgroup=FULL_CGROUP)),
        {"host memory": (FAILED, "20.0 GB are left")},
    ),
    "a user without a name": (
        dict(box=Box(), before=NOBODY),
        {"user": (WARNING, "error code is 19")},
    ),
    "a listener": (
        dict(box=Box(), before=LISTENER),
        {"ports of HCCL": (FAILED, "12345 to 12360: 12347 taken")},
    ),
    "folders": (
        dict(
            box=Box(),
            before=f"{NOEXEC}; {READ_ONLY}; {FULL}",
            shell={"TORCH_EXTENSIONS_DIR": "/tmp/c"},
            options=("--own-ray", "run.root=/tmp/ro/runs"),
        ),
        {
            "MindSpeed's operators": (FAILED, "is mounted noexec"),
            "run.root": (FAILED, "cannot be written"),
            "/tmp": (FAILED, "below 5 % Ray spills no object"),
            "disk for the run": (FAILED, "0.0 GB free"),
        },
    ),
    "no compilers": (
        dict(box=Box(without=("make",), pybind11=False)),
        {"compilers": (FAILED, "make is not installed here; python3: exit 1")},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.full
def test_a_broken_box(name, prepared, tmp_path):
    done, expected = BROKEN[name]
    checks = preflight(**done, files=prepared(done.get("config", THIRTY)), folder=tmp_path / "box")
    assert wrong(checks).keys() <= expected.keys() | BESIDES, wrong(checks)
    for check, (state, words) in expected.items():
        assert checks[check]["state"] == state and words in checks[check]["found"], checks[check]
        assert checks[check]["fix"]


OTHER_PLATFORM = "class Unknown: device_type = ''\ncurrent_platform = Unknown()"
NO_DRIVER = "libascend_hal.so: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    "box, found",
    [
        (Box(raises={"torch_npu": f"raise ImportError({NO_DRIVER!r})"}), NO_DRIVER),
        (Box(raises={"vllm.platforms": OTHER_PLATFORM}), "vLLM took Unknown"),
        (Box(installed=False), "Failed to infer device type"),
        (
            Box(raises={"transformers": "import os; os.kill(os.getpid(), 11)"}),
            "exit -11: importing transformers",
        ),
        (
            Box(raises={"tensordict": "import time; time.sleep(1e6)"}),
            "no answer within 120 s: importing tensordict",
        ),
        (Box(raises={"vllm_ascend.vllm_ascend_C": ""}), "file too short"),
    ],
    ids=["no driver", "another platform", "not installed", "crash", "hang", "cut short"],
)
@pytest.mark.full
def test_imports_of_a_worker(box, found, prepared, tmp_path):
    check = preflight(box, prepared(THIRTY), tmp_path)["imports of a worker"]
    assert check["state"] == (WARNING if "too short" in found else FAILED)
    assert found in check["found"] and check["fix"]


MASKED = {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    "box, config, shell",
    [
        (Box(), THIRTY, {}),
        (Box(mapped=12, sick={13: "Critical"}), TWELVE, {}),
        (Box(dies=8, kind="910B3"), SEVEN, {}),
        pytest.param(Box(dies=8), PAIR, {}, marks=pytest.mark.full),
        pytest.param(Box(), PAIR, MASKED, marks=pytest.mark.full),
    ],
    ids=["16", "12 mapped", "8", "2x8", "2x8 of 16"],
)
def test_healthy_boxes_pass_whole(box, config, shell, prepared, tmp_path):
    checks = preflight(box, prepared(config), tmp_path, config, shell, options=("--own-ray",))
    assert wrong(checks) == {}


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
