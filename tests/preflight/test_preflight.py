"""The preflight on boxes that are played: each fault is found where it is, with what to type. The
real Machine answers on this one.
"""

import getpass
import importlib.util
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

import psutil
import pytest

from mindspeed_qerl import emulation
from mindspeed_qerl.ascend.contract import PINS, Finding, Report
from mindspeed_qerl.ascend.convert import conversion_command
from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.preflight import (
    FAILED,
    GROUPS,
    PASSED,
    SKIPPED,
    WARNING,
    Check,
    preflight,
    print_table,
)
from mindspeed_qerl.preflight.accepted import NAMES
from mindspeed_qerl.preflight.case import Seen
from mindspeed_qerl.preflight.files import read_packed
from mindspeed_qerl.preflight.imports import PACKAGES as PACKAGES_OF_A_WORKER
from mindspeed_qerl.preflight.machine import Machine, ProbeError, cgroup_room, cgroup_threads
from mindspeed_qerl.preflight.npus import CANN_PROBE, _cann, dies, processes, see_npus
from mindspeed_qerl.preflight.software import VERSIONS, allocator_fault
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.tasks.gsm8k.convert import convert
from mindspeed_qerl.tasks.packed import indexed_format

ROOT = Path(__file__).parents[2]
NAME = "grpo_qwen3_30b_a3b_gsm8k_16npu"
# As 910C boxes print it (vllm-project/vllm-ascend issues 2534 and 12980), two chips a card,
# processes below.
HEAD = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
TAIL = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
"""
PROCESS = "| 0       1                 | 632268        | python3.1                | 197                     |\n"
PACKAGES = {
    "torch": "2.7.1",
    "torch_npu": "2.7.1.post1",
    "vllm": "0.11.0+empty",
    "ray": "2.54.0",
    "transformers": "4.57.1",
    "numpy": "1.26.4",
    "peft": "0.7.1",
    "tensordict": "0.8.1",
    "hydra-core": "1.3.2",
}
JEMALLOC = "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"
OPERATORS = "/upstream/vllm-ascend/vllm_ascend/vllm_ascend_C.cpython-311-aarch64-linux-gnu.so"
CANN, ATB = "/usr/local/Ascend/cann", "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1"


def npu_smi(
    count: int, health: dict[int, str] | None = None, used: dict[int, int] | None = None
) -> str:
    rows = ""
    for i in range(count):
        state, watts, memory = (
            (health or {}).get(i, "OK"),
            "178.5" if i % 2 == 0 else "-",
            (used or {}).get(i, 3416),
        )
        rows += (
            f"| {i // 2}     Ascend910           | {state:<14}| {watts:<12}36                0    "
            f"/ 0             |\n| {i % 2}     {i:<20}| 0000:{0x9D + i:02X}:00.0  | 0           "
            f"0    / 0          {memory}/ 65536         |\n+{'-' * 96}+\n"
        )
    return HEAD + rows + TAIL


def at_the_pin(package: str) -> Report:
    pin = PINS[package]
    return Report(pin, Path("/upstream") / pin.title, [], pin.commit, pin.content, [])


@dataclass
class Box:
    """A machine in data: by default a healthy 910C box of 16 dies. Sizes in bytes."""

    smi: str | None = npu_smi(16)
    davinci: int = 16
    nodes: tuple[int, ...] = ()  # their numbers, if not 0, 1, ...
    shut: dict[str, str] = field(default_factory=dict)  # device node -> why it cannot be opened
    acl: int | None = 16
    ray: dict | None = None  # resources and nodes of a running cluster
    raylets: dict[int, dict[str, str]] = field(default_factory=dict)  # pid -> environment
    hangs: tuple[str, ...] = ()  # commands that never answer: a word of theirs
    environment: dict[str, str] = field(
        default_factory=lambda: {
            "ASCEND_HOME_PATH": CANN,
            "ATB_HOME_PATH": ATB,
            "LD_PRELOAD": JEMALLOC,
        }
    )
    folders: tuple[str, ...] = (CANN, "/cann", ATB, OPERATORS)  # that are there
    plugins: tuple[str, ...] = ("ascend",)
    files: dict[str, str] = field(default_factory=dict)  # path -> content
    listening: tuple[tuple[str, int], ...] = ()  # (host, port)
    network: dict[str, list[str]] = field(
        default_factory=lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fe80::1"]}
    )
    room: dict[str, int] = field(default_factory=lambda: {"MemAvailable": 1500 * 10**9})
    read_only: bool = False
    logical_cpus: int = 320
    limit: int = 65536
    shm: int = 500 * 10**9
    disk: int = 2 * 10**12
    left: float = 0.4  # of the disk of /tmp
    taken: tuple[int, ...] = ()
    executable: bool = True
    commands: dict[str, str] = field(
        default_factory=lambda: {"ninja": "1.13.0", "getent": "127.0.0.1  STREAM here\n"}
    )  # what others print
    imported: str = "imported in 31 s\n"  # what the imports of a worker say
    compiling: dict[int, dict[str, str]] = field(default_factory=dict)  # processes of ninja
    panic: str = "0\n"
    cann: str | None = "8.5.0"
    packages: dict[str, str] = field(default_factory=lambda: dict(PACKAGES))
    python_version: tuple[int, int] = (3, 11)
    reports: list[Report] = field(default_factory=lambda: [at_the_pin(package) for package in PINS])

    def run(self, command, timeout=20, environment=None):
        words = " ".join(command)
        if any(word in words for word in self.hangs):
            raise ProbeError(f"{command[0]}: no answer within {timeout:g} s")
        if command[0] == "npu-smi" and self.smi is not None:
            return self.smi
        if "acl.rt.get_device_count" in words and self.acl is not None:
            assert "ASCEND_RT_VISIBLE_DEVICES" not in environment
            return f"warnings of CANN\ndevices {self.acl}\n"
        if "ray.init" in words and self.ray is not None:
            return f"cluster {json.dumps(self.ray)}\n"
        if "importing" in words:
            return self.imported
        if command[0] in self.commands:
            return self.commands[command[0]]
        raise ProbeError(f"{command[0]} is not installed here")

    def glob(self, pattern):
        if pattern.startswith("/dev/davinci"):
            return [f"/dev/davinci{i}" for i in self.nodes or range(self.davinci)]
        if pattern == f"{self.environment.get('ASCEND_HOME_PATH')}/*/ascend_*_install.info":
            return ["ascend_toolkit_install.info"] if self.cann else []
        if found := [folder for folder in self.folders if fnmatch(folder, pattern)]:
            return found
        return [JEMALLOC] if pattern in (JEMALLOC, "/usr/lib/*/libjemalloc.so.2") else []

    def read(self, path):
        addresses = "".join(
            f"address_{die}=192.168.20.{die}\n" for die in self.nodes or range(self.davinci)
        )
        return {
            "/etc/hccn.conf": addresses,
            **self.files,
            "/proc/sys/vm/panic_on_oom": self.panic,
            "ascend_toolkit_install.info": f"package_name=Ascend-cann-toolkit\nversion={self.cann}\narch=aarch64\n",
        }.get(path)

    def version(self, distribution):
        return self.packages.get(distribution)

    def entry_points(self, group):
        return self.plugins if group == "vllm.platform_plugins" else ()

    def importable(self, name):
        return self.acl is not None and name in ("acl", *PACKAGES_OF_A_WORKER)

    def upstream(self):
        return self.reports

    def checkout(self, package):
        return next((report.root for report in self.reports if report.pin is PINS[package]), None)

    def disk_free(self, path):
        return self.shm if str(path) == "/dev/shm" else self.disk

    def disk_left(self, path):
        return self.left

    def cpus(self):
        return self.logical_cpus

    def open_files(self):
        return self.limit

    def may_use(self):
        return 320

    def threads(self):
        return {"kernel.threads-max": 10**6}

    def user(self):
        return "root"

    def listens(self, host, port):
        return (host, port) in self.listening

    def interfaces(self):
        return self.network

    def writable(self, path):
        return not self.read_only

    def closed(self, node):
        return self.shut.get(node, "")

    def may_execute(self, path):
        return self.executable

    def memory(self):
        return self.room

    def port_free(self, port):
        return port not in self.taken

    def processes(self, name):
        return {"raylet": self.raylets, "ninja": self.compiling}.get(name, {})


def cluster(
    npus: int, cpus: int = 320, nodes: int = 1, free: int | None = None, jobs: tuple[str, ...] = ()
) -> dict:
    return {
        "resources": {"NPU": float(npus), "CPU": float(cpus)},
        "nodes": nodes,
        "npus": [npus // nodes] * nodes,
        "cpus": [cpus // nodes] * nodes,
        "jobs": list(jobs),
        "available": {"NPU": float(npus if free is None else free), "CPU": float(cpus)},
    }


QWEN3_MOE = dict(
    model_type="qwen3_moe",
    num_hidden_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=151936,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
)


# Of a file of Qwen3-30B-A3B for TP 1 PP 1 EP 16, bfloat16: the dense part, 3.09 GB, and a sixteenth
# of the experts.
SHARE = 6_720_000_000
WEIGHTS = 61_100_000_000  # of the whole model


def write_checkpoint(
    folder: Path, names: list[str], tracker: str = "1", size: int = 4 * SHARE
) -> None:
    """By default large enough for any layout; holes take no room."""
    for name in names:
        path = (
            folder
            / ("release" if tracker == "release" else f"iter_{int(tracker):07d}")
            / name
            / "model_optim_rng.pt"
        )
        path.parent.mkdir(parents=True)
        hole(path, size)
        with zipfile.ZipFile(path, "a") as file:
            file.writestr("data.pkl", name)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)


def write_packed(prefix: Path, rows: dict[str, list[list[int]]]) -> None:
    for column, values in rows.items():
        contents = indexed_format(values)
        for ending, content in zip(("bin", "idx"), contents):
            Path(f"{prefix}_packed_{column}_document.{ending}").write_bytes(content)


def hole(file: Path, size: int) -> None:
    with open(file, "wb") as empty:
        empty.truncate(size)


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """The resolved config whose model, data and base weights are there; raw["..."] can be changed."""
    monkeypatch.setenv("MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    raw = compose(NAME, [f"run.root={tmp_path / 'runs'}"])
    model = Path(raw["megatron_training"]["tokenizer_name_or_path"])
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(QWEN3_MOE))
    for name, content in (
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"chat_template": "..."}'),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"lm_head.weight": "model-1.safetensors"}}',
        ),
    ):
        (model / name).write_text(content)
    hole(model / "model-1.safetensors", WEIGHTS)
    train = Path(raw["megatron_training"]["data_path"])
    train.parent.mkdir(parents=True)
    write_packed(
        train, {"input_ids": [[1, 2, 3 + i] for i in range(80)], "labels": [[i] for i in range(80)]}
    )
    source = tmp_path / "source"
    source.mkdir()
    for split, numbers in (("train", range(80)), ("test", range(80, 90))):
        (source / f"{split}.jsonl").write_text(
            "".join(
                json.dumps({"question": f"{n}+4?", "answer": f"It is {n + 4}\n#### {n + 4}"}) + "\n"
                for n in numbers
            )
        )
    convert(source, Path(raw["task"]["test_file"]).parent)
    write_checkpoint(
        Path(raw["actor_config"]["load"]), [f"mp_rank_00_{i:03d}" for i in range(16)], size=SHARE
    )
    return raw


def look(raw, box, nodes: int = 1) -> dict[str, Check]:
    """name -> check; every fault has its way out, and nothing broke inside."""
    checks = preflight(raw, NAME, box, nodes)
    assert not [check for check in checks if "could not be checked" in check.found]
    assert len({(check.group, check.name) for check in checks}) == len(checks)
    refused_by_the_engine = {
        check.name for check in checks if check.group in ("config", "model", "versions")
    }
    assert {check.name for check in checks if check.state == FAILED} <= {
        "ranks",
        *NAMES,
        *refused_by_the_engine,
    }
    return {check.name: check for check in checks}


def not_passed(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.state for name, check in checks.items() if check.state != PASSED}


def test_a_box_that_is_ready(ready):
    checks = look(ready, Box())
    assert not_passed(checks) == {}
    assert not any(check.fix for check in checks.values())
    assert checks["ranks"].found == "16 asked for; npu-smi 16, /dev/davinci* 16, CANN 16"
    assert checks["Ray"].found == "none is running; one that is started now counts 16"
    assert (
        "TP 1 PP 1 EP 16 DP 16" in checks["layout"].found
        and "16 of 16 files for TP 1 PP 1 EP 16" in checks["base weights"].found
    )
    assert list(dict.fromkeys(check.group for check in checks.values())) == list(GROUPS)


def test_a_ray_that_is_ready(ready):
    assert not_passed(look(ready, Box(ray=cluster(16), raylets={7: {"PATH": "/bin"}}))) == {}


# ---- 12 of 16 ----

TWELVE = ",".join(map(str, range(12)))


def test_twelve_in_the_list_of_visible_devices(ready):
    box = Box()
    box.environment["ASCEND_RT_VISIBLE_DEVICES"] = TWELVE
    checks = look(ready, box)
    assert not_passed(checks) == {
        "ranks": FAILED,
        "ASCEND_RT_VISIBLE_DEVICES": FAILED,
        "Ray": WARNING,
    }
    assert checks["ranks"].found == (
        "12 of 16 asked for; npu-smi 16, /dev/davinci* 16, CANN 16, "
        "ASCEND_RT_VISIBLE_DEVICES 12. Lost at ASCEND_RT_VISIBLE_DEVICES"
    )
    assert checks["ASCEND_RT_VISIBLE_DEVICES"].fix.startswith("unset ASCEND_RT_VISIBLE_DEVICES")
    assert "counts 12" in checks["Ray"].found


def test_a_container_with_twelve_device_nodes(ready):
    checks = look(ready, Box(smi=None, davinci=12, acl=12))
    assert not_passed(checks) == {
        "ranks": FAILED,
        "npu-smi": WARNING,
        "/dev/davinci*": FAILED,
        "CANN": WARNING,
        "Ray": WARNING,
        "driver": SKIPPED,
    }
    assert "Lost at /dev/davinci*" in checks["ranks"].found and "12 of 16" in checks["ranks"].found
    assert "--device=/dev/davinci15" in checks["/dev/davinci*"].fix


def test_a_container_whose_npu_smi_sees_the_host(ready):
    checks = look(ready, Box(davinci=12, acl=12))
    assert not_passed(checks) == {
        "ranks": FAILED,
        "/dev/davinci*": FAILED,
        "CANN": WARNING,
        "Ray": WARNING,
    }


def test_a_stale_ray(ready):
    """Started with a list of twelve that the shell no longer has."""
    raylets = {4242: {"ASCEND_RT_VISIBLE_DEVICES": TWELVE}}
    checks = look(ready, Box(ray=cluster(12), raylets=raylets))
    assert not_passed(checks) == {"ranks": FAILED, "Ray": FAILED}
    assert (
        f"process 4242) was started with ASCEND_RT_VISIBLE_DEVICES={TWELVE}" in checks["Ray"].found
    )
    assert checks["Ray"].fix.splitlines()[1] == """ray start --head --resources='{"NPU": 16}'"""
    assert "Lost at Ray" in checks["ranks"].found


def test_a_ray_started_with_other_resources(ready):
    checks = look(ready, Box(ray=cluster(12), raylets={4242: {"PATH": "/bin"}}))
    assert not_passed(checks) == {"ranks": FAILED, "Ray": FAILED}
    assert "other --resources" in checks["Ray"].found


def test_a_ray_that_does_not_answer(ready):
    checks = look(ready, Box(hangs=("ray.init",), raylets={4242: {}}))
    assert not_passed(checks) == {"ranks": FAILED, "Ray": FAILED, "CPUs": SKIPPED}
    assert "no answer within 20 s" in checks["Ray"].found and checks["ranks"].found.startswith(
        "16 asked for"
    )


def test_a_die_that_does_not_come_up(ready):
    checks = look(ready, Box(acl=15))
    assert not_passed(checks) == {"ranks": FAILED, "CANN": FAILED, "Ray": WARNING}
    assert "15 of 16" in checks["ranks"].found and "15 of the 16 devices" in checks["CANN"].found


def test_a_die_that_npu_smi_calls_sick(ready):
    checks = look(ready, Box(smi=npu_smi(16, health={7: "Critical"}), acl=15))
    assert checks["npu-smi"].state == checks["CANN"].state == checks["ranks"].state == FAILED
    assert "NPU 3 chip 1: Critical" in checks["npu-smi"].found
    assert checks["npu-smi"].fix.startswith("npu-smi info -t health -i 3 -c 1\n")


def test_a_die_that_npu_smi_does_not_list(ready):
    table = npu_smi(16).splitlines(keepends=True)
    gone = next(i for i, line in enumerate(table) if line.startswith("| 1     7 "))
    checks = look(
        ready, Box(smi="".join(table[: gone - 1] + table[gone + 2 :]), davinci=15, acl=15)
    )
    assert "15 dies; one chip of NPU 3 is missing" in checks["npu-smi"].found
    assert not_passed(checks) == {
        "ranks": FAILED,
        "npu-smi": FAILED,
        "/dev/davinci*": WARNING,
        "CANN": WARNING,
        "Ray": WARNING,
    }


def test_memory_in_use_by_somebody_else(ready):
    checks = look(ready, Box(smi=npu_smi(16, used={5: 31877})))
    assert not_passed(checks) == {"npu-smi": FAILED, "ranks": FAILED}
    assert "NPU 2 chip 1 (31,877 of 65,536 MB)" in checks["npu-smi"].found


def test_imports_are_tried_where_they_can_be(ready, monkeypatch):
    """With what a worker has in its environment; not without NPUs, nor where a package is missing."""
    asked = []
    monkeypatch.setattr(
        Box,
        "run",
        lambda box, command, timeout=20, environment=None, run=Box.run: (
            asked.append((timeout, environment)) if "importing" in " ".join(command) else None,
            run(box, command, timeout, environment),
        )[1],
    )
    check = look(ready, Box())["imports of a worker"]
    assert (check.state, check.found) == (
        PASSED,
        "imported in 31 s, with the environment of a worker",
    )
    [(limit, environment)] = asked
    assert (
        limit == 120
        and environment["LD_PRELOAD"] == JEMALLOC
        and environment["VLLM_DP_SIZE"] == "16"
    )
    assert environment["HCCL_IF_BASE_PORT"] == "12345" and environment["HCCL_BUFFSIZE"] == "640"
    monkeypatch.setattr(Box, "importable", lambda box, name: name == "acl")
    check = look(ready, Box())["imports of a worker"]
    assert check.state == SKIPPED and check.found.startswith(
        "not tried: there is no torch, torch_npu, vllm, "
    )
    check = look(ready, Box(smi=None, davinci=0, acl=None))["imports of a worker"]
    assert check.state == SKIPPED and check.found.startswith("no NPU here") and len(asked) == 1


def test_a_process_on_a_die(ready):
    """With little memory; one on a die that the run does not take is none of its business."""
    box = Box(
        smi=npu_smi(16) + PROCESS + PROCESS.replace("632268", "NA    ").replace("| 0 ", "| 3 ")
    )
    checks = look(ready, box)
    assert not_passed(checks) == {"processes on the dies": WARNING}
    assert checks["processes on the dies"].found.startswith(
        "davinci1: python3.1 (process 632268, 197 MB); davinci7: python3.1 (process NA, 197 MB). "
        "If one of them"
    )
    ready["rl_config"]["actor_resource"]["num_npus"] = 4
    assert "davinci7" not in look(ready, box)["processes on the dies"].found
    assert "processes on the dies" not in look(
        ready, replace(box, smi=npu_smi(16) + PROCESS.replace("| 0 ", "| 7 "))
    )


@pytest.mark.parametrize(
    "shut, found",
    [
        ({"/dev/hisi_hdc": "is not there"}, "16 device nodes, and /dev/hisi_hdc is not there"),
        (
            {
                f"/dev/davinci{i}": "is crw-rw---- of user 1000, group 1000: user 0 cannot open it"
                for i in range(6)
            },
            "/dev/davinci0 is crw-rw---- of user 1000, group 1000: user 0 cannot open it; ",
        ),
    ],
)
def test_device_nodes_that_cannot_be_opened(ready, shut, found):
    checks = look(ready, Box(shut=shut, acl=0))
    assert checks["/dev/davinci*"].state == FAILED and found in checks["/dev/davinci*"].found
    assert "--device=/dev/hisi_hdc" in checks["/dev/davinci*"].fix
    assert checks["/dev/davinci*"].found.endswith("; and 2 more") == (len(shut) > 4)


def test_ports_go_by_the_numbers_of_the_dies(ready):
    box = Box(smi=None, davinci=16, nodes=tuple(range(16, 32)), taken=(12370,))
    check = look(ready, box)["ports of HCCL"]
    assert check.state == FAILED and check.found == "12345 to 12376: 12370 taken"
    assert look(ready, Box(taken=(12370,)))["ports of HCCL"].state == PASSED
    box.environment["HCCL_IF_BASE_PORT"] = "65515"
    assert "must be a whole number from 1024 to 65504" in look(ready, box)["ports of HCCL"].found


def test_dies_that_set_device_would_miss(ready):
    """Twelve of sixteen by the last numbers: Ray's number 15 goes to set_device of a process that
    sees twelve.
    """
    ready["rl_config"]["actor_resource"]["num_npus"] = 12
    box = Box()
    box.environment["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, range(4, 16)))
    check = look(ready, box)["ASCEND_RT_VISIBLE_DEVICES"]
    assert check.state == FAILED and check.fix == f"export ASCEND_RT_VISIBLE_DEVICES={TWELVE}"
    box.environment["ASCEND_RT_VISIBLE_DEVICES"] = TWELVE
    assert look(ready, box)["ASCEND_RT_VISIBLE_DEVICES"].state == PASSED


@pytest.mark.parametrize("given, entries", [("", 0), ("NoDevFiles", 0), ("3", 1)])
def test_the_list_is_counted_as_ray_counts_it(ready, given, entries, monkeypatch):
    from ray._private.accelerators.npu import NPUAcceleratorManager

    box = Box()
    box.environment["ASCEND_RT_VISIBLE_DEVICES"] = given
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", given)
    assert len(NPUAcceleratorManager.get_current_process_visible_accelerator_ids()) == entries
    assert look(ready, box)["ASCEND_RT_VISIBLE_DEVICES"].found.startswith(f"{entries} entries")


def test_two_nodes_of_eight(ready):
    checks = look(ready, Box(smi=npu_smi(8), davinci=8, acl=8), nodes=2)
    assert not_passed(checks) == {"HCCL_SOCKET_IFNAME": WARNING}
    checks = look(
        ready, Box(smi=npu_smi(8), davinci=8, acl=8, ray=cluster(8), raylets={7: {}}), nodes=2
    )
    assert checks["Ray"].state == FAILED and "on each of them" in checks["Ray"].fix
    checks = look(
        ready,
        Box(smi=npu_smi(8), davinci=8, acl=8, ray=cluster(16, cpus=640, nodes=2), raylets={7: {}}),
        nodes=2,
    )
    assert checks["ranks"].state == checks["Ray"].state == PASSED


def test_no_npu_at_all(ready):
    checks = look(ready, Box(smi=None, davinci=0, acl=None, environment={}))
    assert checks["ranks"].state == FAILED
    assert checks["ranks"].fix.endswith(
        f"python cli/train_grpo.py --config-name {NAME} engine=local rehearsal.enabled=true"
    )
    for name in (
        "npu-smi",
        "/dev/davinci*",
        "CANN",
        "ASCEND_RT_VISIBLE_DEVICES",
        "Ray",
        "CANN's paths",
    ):
        assert checks[name].state == SKIPPED, name
    # the rest is checked
    assert (
        checks["layout"].state
        == checks["rotary base"].state
        == checks["base weights"].state
        == PASSED
    )


def test_a_ray_that_will_be_started(ready):
    """As the launchers do: the one that runs is not joined, and the new one is told its number of
    CPUs.
    """
    box = Box(ray=cluster(12), raylets={4242: {}}, logical_cpus=8, taken=(6379,))
    box.environment["RAY_ADDRESS"] = "127.0.0.1:1"
    checks = {check.name: check for check in preflight(ready, NAME, box, own_ray=True)}
    assert (
        not_passed(checks) == {}
        and checks["Ray"].found == "one of its own that is started now counts 16"
    )
    assert not_passed(look(ready, box)).keys() == {"ranks", "Ray"}


def test_a_table_of_npu_smi_in_another_form(ready):
    checks = look(ready, Box(smi="+----+\n| 16 NPUs, all well |\n+----+"))
    assert not_passed(checks) == {"npu-smi": WARNING, "driver": SKIPPED}
    assert "not known here: +----+ | 16 NPUs, all well |" in checks["npu-smi"].found
    assert checks["ranks"].found == "16 asked for; /dev/davinci* 16, CANN 16"


# ---- the host ----


@pytest.mark.parametrize(
    "change, name, state, found, fix",
    [
        ({"disk": 10**9}, "disk for the run", FAILED, "1.0 GB free", "run.root=DIR"),
        ({"disk": 10**11}, "disk for the run", WARNING, "100 GB free", "run.root=DIR"),
        ({"shm": 64 * 2**20}, "/dev/shm", WARNING, "67.1 MB free", "--shm-size"),
        ({"limit": 1024}, "open files", WARNING, "ulimit -n is 1,024", "ulimit -n 32768"),
        (
            {"panic": "1\n"},
            "vm.panic_on_oom",
            WARNING,
            "the whole machine reboots",
            "sysctl -w vm.panic_on_oom=0",
        ),
        (
            {"taken": (12350,)},
            "ports of HCCL",
            FAILED,
            "12345 to 12360: 12350 taken",
            "HCCL_IF_BASE_PORT",
        ),
        ({"taken": (6379,)}, "ports of Ray", WARNING, "6379 (Ray's head) taken", "--port=6380"),
        (
            {"left": 0.049},
            "/tmp",
            FAILED,
            "4.9 % of its disk are free, 2,000 GB: below 5 % Ray spills no",
            "du -xh",
        ),
        ({"left": 0.06}, "/tmp", WARNING, "6.0 % of its disk are free", "du -xh"),
        (
            {"environment": {"ASCEND_HOME_PATH": "/cann", "ATB_HOME_PATH": ATB}},
            "jemalloc",
            WARNING,
            "not in LD_PRELOAD",
            f"export LD_PRELOAD={JEMALLOC}",
        ),
        (
            {
                "environment": {
                    "ASCEND_HOME_PATH": "/cann",
                    "ATB_HOME_PATH": ATB,
                    "LD_PRELOAD": "/nowhere/libjemalloc.so",
                }
            },
            "jemalloc",
            WARNING,
            "which is not there",
            JEMALLOC,
        ),
        (
            {"environment": {"ATB_HOME_PATH": ATB, "LD_PRELOAD": JEMALLOC}},
            "CANN's paths",
            FAILED,
            "set_env.sh was not sourced",
            "source /usr/local/Ascend",
        ),
        (
            {"cann": "8.2.RC1"},
            "CANN's version",
            FAILED,
            "8.2.RC1; MindSpeed at the pin is for 8.3.RC1",
            "CANN 8.5.0",
        ),
        (
            {"cann": "8.4.0"},
            "CANN's version",
            WARNING,
            "8.4.0; vllm-ascend was run for 8.5.0 and 8.3.RC1",
            "CANN 8.5.0",
        ),
        (
            {"cann": None},
            "CANN's version",
            WARNING,
            "not in any ascend_*_install.info",
            "CANN 8.5.0",
        ),
        (
            {"packages": {**PACKAGES, "triton-ascend": "3.2.0"}},
            "triton-ascend",
            WARNING,
            "3.2.0",
            "pip uninstall --yes triton-ascend",
        ),
        (
            {"packages": {**PACKAGES, "vllm": "0.11.1"}},
            "vllm",
            FAILED,
            "0.11.1 is installed, the pin is 0.11.0",
            "docs/ascend.md",
        ),
        (
            {"packages": {**PACKAGES, "torch": "2.7.10"}},
            "torch",
            FAILED,
            "2.7.10 is installed",
            "docs/ascend.md",
        ),
        (
            {"packages": {**PACKAGES, "vllm": "0.11.0rc2"}},
            "vllm",
            FAILED,
            "0.11.0rc2 is installed",
            "docs/ascend.md",
        ),
        (
            {"packages": {**PACKAGES, "ray": "2.42.1"}},
            "ray",
            WARNING,
            "2.42.1 is installed, the pin is 2.54.0",
            "pip install ray==2.54.0",
        ),
        (
            {"packages": {k: v for k, v in PACKAGES.items() if k != "peft"}},
            "peft",
            FAILED,
            "not installed; the pin is 0.7.1",
            "pip install peft==0.7.1",
        ),
        ({"python_version": (3, 10)}, "Python", FAILED, "3.10", "3.11"),
    ],
)
def test_the_host(ready, change, name, state, found, fix):
    checks = look(ready, Box(**change))
    assert not_passed(checks) == {name: state}
    assert found in checks[name].found and fix in checks[name].fix


def test_cpus(ready):
    """16 x 4 for the bundles, 2 tasks of 1, 10 for the transfer dock: 76 (launcher.py:90,
    transfer_dock.py:248).
    """
    assert look(ready, Box(logical_cpus=76))["CPUs"].state == PASSED
    check = look(ready, Box(logical_cpus=75))["CPUs"]
    assert check.state == FAILED and "reserve 76 logical CPUs; there are 75" in check.found
    assert (
        check.fix.startswith("rl_config.num_cpus_for_placement_group=3 ")
        and "--num-cpus=76" in check.fix
    )
    raylets = {7: {}}
    # what Ray has counts, not the machine
    assert look(ready, Box(ray=cluster(16, cpus=64), raylets=raylets))["CPUs"].state == FAILED
    assert (
        look(ready, Box(logical_cpus=8, ray=cluster(16, cpus=76), raylets=raylets))["CPUs"].state
        == PASSED
    )


def test_cpus_that_no_single_node_has(ready):
    """Two nodes whose 84 are more than the 76, and whose 42 are the 32 of eight ranks and the
    transfer dock's 10.
    """

    def checked(cpus):
        ray = cluster(16, cpus=cpus, nodes=2)
        return look(
            ready, Box(smi=npu_smi(8), davinci=8, acl=8, ray=ray, raylets={7: {}}), nodes=2
        )["CPUs"]

    assert checked(86).state == PASSED
    check = checked(84)
    assert (
        check.state == FAILED
        and "the nodes have 42, 42 CPUs free; their ranks reserve 32" in check.found
    )
    assert "--num-cpus=76    # on each node" in check.fix


def test_the_room_that_checkpoints_need(ready):
    """Five saves of 116 steps, every 20: adapters of 30B-A3B by hand, bfloat16 and AdamW's 12
    bytes, in 16 files.
    """
    dense = 48 * 32 * ((2048 + 5120) + (4096 + 2048))
    experts = 48 * 128 * 32 * ((2048 + 2 * 768) + (768 + 2048))
    one = 14 * (16 * dense + experts)
    assert f"({116 // 20} x {one / 1e9:.1f} GB)" in look(ready, Box())["disk for the run"].found
    assert look(ready, Box(disk=5 * one))["disk for the run"].state == PASSED
    assert look(ready, Box(disk=5 * one - 1))["disk for the run"].state == WARNING
    assert look(ready, Box(disk=one - 1))["disk for the run"].state == FAILED


def test_the_room_that_the_conversion_needs(ready):
    """3.1 GB of dense weights in each of 16 files and 58 GB of experts once."""
    load = Path(ready["actor_config"]["load"])
    (load / "latest_checkpointed_iteration.txt").unlink()
    check = look(ready, Box())["disk for the base"]
    need = float(re.search(r"about (\d+) GB", check.found)[1])
    assert need == pytest.approx(16 * 3.09 + 58, rel=0.01) and check.state == PASSED
    assert look(ready, Box(disk=10**11))["disk for the base"].state == FAILED


# ---- environment and upstream ----


@pytest.mark.parametrize(
    "name, value, state, found",
    [
        (
            "VLLM_ASCEND_ENABLE_NZ",
            "1",
            FAILED,
            "'1' in the shell, the engine would set '0': upstream trains with 0",
        ),
        ("VLLM_USE_V1", "0", FAILED, "the engine would set '1'"),
        ("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", "", FAILED, "hide all but one die"),
        (
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
            "1",
            WARNING,
            "the engine would set 'true'",
        ),
        ("HCCL_CONNECT_TIMEOUT", "120", WARNING, "'120' in the shell, the engine would set '1800'"),
        ("VLLM_DP_SIZE", "8", WARNING, "is not used"),
        ("HCCL_BUFFSIZE", "8", WARNING, "is not used"),
        ("ASCEND_LAUNCH_BLOCKING", "1", WARNING, "every kernel is waited for"),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "max_split_size_mb:256",
            WARNING,
            "the engine would set 'expandable_segments:True'",
        ),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            "expandable_segments:True,max_split_size_mb:256",
            FAILED,
            "not take them together",
        ),
        (
            "HCCL_OP_EXPANSION_MODE",
            "AIV",
            FAILED,
            "which the dispatch of experts (vLLM's EP 16) waits for: vLLM was",
        ),
        (
            "OMP_PROC_BIND",
            "TRUE",
            FAILED,
            "OpenMP binds a worker, and all that it starts, to one core",
        ),
        (
            "VLLM_PLUGINS",
            "lora_filesystem_resolver,ascending",
            FAILED,
            "Failed to infer device type",
        ),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050", WARNING, "HCCL listens there"),
        ("HCCL_INTRA_ROCE_ENABLE", "1", WARNING, "leaves HCCS for the NPUs' network ports"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", WARNING, "no torch.npu"),
        ("RAY_grpc_enable_http_proxy", "1", WARNING, "through http_proxy"),
    ],
)
def test_a_variable_of_the_shell(ready, name, value, state, found):
    box = Box()
    box.environment[name] = value
    checks = look(ready, box)
    assert (
        not_passed(checks) == {name: state}
        and found in checks[name].found
        and checks[name].fix == f"unset {name}"
    )
    assert name not in checks["other variables"].found


def test_variables_that_nobody_here_sets(ready):
    """Named, and no fault; those of set_env.sh, of the engine and of other checks are none of them."""
    box = Box()
    box.environment |= {
        "ASCEND_OPP_PATH": f"{CANN}/opp",
        "ASCEND_TOOLKIT_HOME": CANN,
        "VLLM_USE_V1": "1",
        "PATH": "/",
    }
    checks = look(ready, box)
    assert not_passed(checks) == {} and checks["other variables"].found.startswith(
        "none of HCCL_*, ASCEND_*, "
    )
    box.environment |= {
        "VLLM_ASCEND_ENABLE_FLASHCOMM": "1",
        "HCCL_OP_RETRY_ENABLE": "L0:0",
        "OMP_PROC_BIND": "false",
        "HCCL_OP_EXPANSION_MODE": "AI_CPU",
        "VLLM_PLUGINS": "ascend,ascend_enhanced_model",
        "HCCL_INTRA_ROCE_ENABLE": "0",
        "ATB_LLM_COMM_BACKEND": "lccl",
    }
    checks = look(ready, box)
    assert not_passed(checks) == {} and checks["other variables"].found == (
        "ATB_LLM_COMM_BACKEND, HCCL_INTRA_ROCE_ENABLE, HCCL_OP_EXPANSION_MODE, "
        "HCCL_OP_RETRY_ENABLE, OMP_PROC_BIND, VLLM_ASCEND_ENABLE_FLASHCOMM, VLLM_PLUGINS: neither "
        "the engine nor set_env.sh sets them, and the workers have them"
    )


def test_the_same_value_in_the_shell_is_no_fault(ready):
    box = Box()
    box.environment |= {"VLLM_ASCEND_ENABLE_NZ": "0", "ASCEND_LAUNCH_BLOCKING": "0"}
    assert not_passed(look(ready, box)) == {}


@pytest.mark.parametrize(
    "change, name, state, found, fix",
    [
        (
            {"packages": {**PACKAGES, "numpy": "2.2.6"}},
            "numpy",
            FAILED,
            "the pin is 1.26.4: with numpy 2",
            "pip install numpy==1.26.4",
        ),
        (
            {"packages": {**PACKAGES, "numpy": "1.26.0"}},
            "numpy",
            WARNING,
            "1.26.0 is installed",
            "numpy==1.26.4",
        ),
        (
            {"packages": {**PACKAGES, "triton": "3.4.0"}},
            "triton",
            WARNING,
            "0 active drivers",
            "uninstall --yes triton",
        ),
        (
            {"packages": {**PACKAGES, "transformer-engine": "2.0"}},
            "transformer-engine",
            WARNING,
            "CUDA",
            "uninstall",
        ),
        (
            {"plugins": ("lora",)},
            "vLLM's platform",
            FAILED,
            "vllm-ascend in /upstream/vllm-ascend is not installed",
            "(cd /upstream/vllm-ascend && COMPILE_CUSTOM_KERNELS=1 python setup.py install)",
        ),
        (
            {"folders": Box().folders[:-1]},
            "vllm-ascend's operators",
            WARNING,
            "no vllm_ascend_C*.so",
            "setup.py install",
        ),
    ],
)
def test_packages_that_do_not_go_together(ready, change, name, state, found, fix):
    checks = look(ready, Box(**change))
    assert (
        not_passed(checks) == {name: state}
        and found in checks[name].found
        and fix in checks[name].fix
    )


def test_libraries_of_both_abis(ready):
    box, other = Box(), ATB.replace("abi_1", "abi_0")
    box.environment["LD_LIBRARY_PATH"] = f"{ATB}/lib:{ATB}/examples:{CANN}/lib64:{other}/lib"
    check = look(ready, box)["NNAL"]
    assert check.state == WARNING and check.found.startswith(
        "LD_LIBRARY_PATH has cxx_abi_0 and cxx_abi_1: "
    )
    assert "nnal/atb/set_env.sh" in check.fix
    box.environment["LD_LIBRARY_PATH"] = f"{ATB}/lib:{ATB}/examples"
    assert not_passed(look(ready, box)) == {}


# ---- compiling ----

DATASETS = "/upstream/Megatron-LM/megatron/core/datasets"
MADE = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
INCLUDES = ("/usr/include/python3.11", "/pip/pybind11/include")
HEADERS = (f"{INCLUDES[0]}/Python.h", f"{INCLUDES[1]}/pybind11/pybind11.h")


def compiles(target: str = MADE, includes: tuple[str, ...] = INCLUDES) -> str:
    flags = " ".join(f"-I{place}" for place in includes)
    return (
        f"make: Entering directory '{DATASETS}'\ng++ -O3 -shared {flags} helpers.cpp -o {target}\n"
    )


@pytest.mark.parametrize(
    "make, more, headers, found",
    [
        ("make: Nothing to be done for 'default'.\n", {}, (), None),
        (compiles(), {"g++": "13"}, HEADERS, None),
        (None, {}, (), "make is not installed here: rank 0 compiles"),
        (compiles(), {}, HEADERS, "g++ is not installed here: rank 0"),
        (
            compiles(includes=()),
            {"g++": "13"},
            HEADERS,
            "no pybind11/pybind11.h (pybind11 of the python3 of PATH); no P",
        ),
        (compiles(), {"g++": "13"}, HEADERS[1:], "no Python.h (python3.11-dev): rank 0"),
        (
            compiles("helpers_cpp"),
            {"g++": "13"},
            HEADERS,
            f"another Python's: helpers_cpp in place of {MADE}: rank 0",
        ),
        (compiles("helpers_cpp"), {"g++": "13"}, (*HEADERS, f"{DATASETS}/{MADE}"), None),
    ],
)
def test_megatrons_helpers(ready, make, more, headers, found):
    box = Box(folders=(*Box().folders, f"{DATASETS}/Makefile", *headers))
    box.commands |= more if make is None else {"make": make, **more}
    checks = look(ready, box)
    assert not_passed(checks) == ({"Megatron's helpers": FAILED} if found else {})
    if found:
        assert found in checks["Megatron's helpers"].found
        assert checks["Megatron's helpers"].fix.splitlines()[-1].startswith(f"make -C {DATASETS} ")


@pytest.mark.parametrize(
    "environment, change, state, found, fix",
    [
        (
            {},
            {"commands": {}},
            FAILED,
            "ninja is not installed here: torch compiles",
            "pip install ninja",
        ),
        (
            {"HOME": "/home/u"},
            {"folders": ("/home/u/.cache/torch_extensions/py311_cpu/gmm/lock",)},
            FAILED,
            "py311_cpu/gmm/lock: left by a build that was killed",
            "rm -r /home/u/.cache/torch_extensions/py311_cpu/gmm",
        ),
        (
            {"TORCH_EXTENSIONS_DIR": "/fast"},
            {"folders": ("/fast/gmm/lock",), "compiling": {7: {}}},
            WARNING,
            "/fast/gmm/lock: somebody compiles now",
            "rm -r /fast/gmm",
        ),
        (
            {"TORCH_EXTENSIONS_DIR": "/fast"},
            {"executable": False},
            FAILED,
            "/fast is mounted noexec",
            "EXTENSIONS_DIR=",
        ),
    ],
)
def test_mindspeeds_operators(ready, environment, change, state, found, fix):
    box = replace(Box(), **{**change, "folders": (*Box().folders, *change.get("folders", ()))})
    box.environment |= environment
    checks = look(ready, box)
    assert not_passed(checks) == {"MindSpeed's operators": state}
    check = checks["MindSpeed's operators"]
    assert found in check.found and fix in check.fix


def test_a_dense_model_may_lack_ninja(tmp_path):
    dense = "grpo_qwen25_7b_gsm8k_8npu"
    checks = preflight(compose(dense, [f"run.root={tmp_path}"]), dense, Box(commands={}), 1)
    assert [check.state for check in checks if check.name == "MindSpeed's operators"] == [WARNING]


def test_a_lock_of_another_python_is_none(ready):
    """Nor one of the default folder, where another is given."""
    for environment, lock in (
        ({"HOME": "/u"}, "/u/.cache/torch_extensions/py38_cpu/gmm/lock"),
        ({"TORCH_EXTENSIONS_DIR": "/fast"}, "/u/.cache/torch_extensions/py311_cpu/gmm/lock"),
    ):
        box = Box(folders=(*Box().folders, lock))
        box.environment |= {"HOME": "/u", **environment}
        assert not_passed(look(ready, box)) == {}


def test_upstream(ready):
    rl, llm, mindspeed, *others = Box().reports
    check = look(ready, Box())["upstream's sources"]
    assert (
        check.found == "MindSpeed-RL, MindSpeed-LLM, MindSpeed, Megatron-LM, vllm-ascend as pinned"
    )
    check = look(ready, Box(reports=[llm, mindspeed, *others]))["upstream's sources"]
    assert check.state == FAILED and check.found == "cannot be imported here: MindSpeed-RL"
    assert "PYTHONPATH" in check.fix and "vllm-ascend" not in check.fix
    *others_than_vllm, _ = Box().reports
    assert (
        "cd vllm-ascend && COMPILE_CUSTOM_KERNELS=1 python setup.py install"
        in look(ready, Box(reports=others_than_vllm))["upstream's sources"].fix
    )
    emulated = Box(
        smi=None, davinci=0, acl=None, reports=others_than_vllm
    )  # its stand-ins have the entry point
    assert (
        "$PWD/vllm-ascend:"
        in look({**ready, "emulate_npu": True}, emulated)["upstream's sources"].fix
    )

    changed = replace(
        rl, findings=[Finding("mindspeed_rl/x.py", "f", "we call it", "changed", "", 3)]
    )
    other = replace(mindspeed, commit=None, content="another")
    checks = look(ready, Box(reports=[changed, llm, other, *others]))
    assert not_passed(checks) == {"MindSpeed-RL": FAILED, "MindSpeed": WARNING}
    assert checks["MindSpeed-RL"].found.endswith(
        "; 0 of 1 things that the engine relies on are unchanged; changed mindspeed_rl/x.py f"
    )
    assert "git checkout 05a90d7" in checks["MindSpeed-RL"].fix
    assert (
        "is an unknown version (no git checkout), not the pin ac9f0e7" in checks["MindSpeed"].found
    )
    second = replace(llm, unused=[Path("/second")])
    assert not_passed(look(ready, Box(reports=[rl, second, mindspeed, *others]))) == {
        "MindSpeed-LLM": WARNING
    }


def test_vllm_ascend_is_compared_on_emulated_npus_too(ready):
    *others, vllm_ascend = Box().reports
    changed = replace(
        vllm_ascend,
        content="another",
        findings=[Finding("vllm_ascend/x.py", "f", "we read it", "gone", "", 0)],
    )
    box = Box(smi=None, davinci=0, acl=None, reports=[*others, changed])
    assert not_passed(look({**ready, "emulate_npu": True}, box))["vllm-ascend"] == FAILED
    assert not_passed(look(ready, Box(reports=[*others, changed]))) == {"vllm-ascend": FAILED}


def test_the_versions_are_those_of_the_guide():
    guide = (ROOT / "docs" / "ascend.md").read_text()
    pins = {name: pin for name, (pin, _) in VERSIONS.items()}
    assert f"| torch, torch_npu | {pins['torch']} |" in guide and pins["torch"] == pins["torch_npu"]
    assert f"(v{pins['vllm']})" in guide
    assert (
        f"| ray, transformers, peft | {pins['ray']}, {pins['transformers']}, {pins['peft']} |"
        in guide
    )


# ---- config, model ----


def test_faults_of_the_config(ready):
    ready["rl_config"]["verifier_function"] = ["gsm8c"]
    ready["actor_config"]["save"] = "x"
    checks = look(ready, Box())
    assert not_passed(checks) == {
        "rl_config.verifier_function": FAILED,
        "actor_config.save": FAILED,
    }
    assert "did you mean 'gsm8k'" in checks["rl_config.verifier_function"].found


def test_an_illegal_layout(ready):
    ready["generate_config"]["infer_expert_parallel_size"] = 8
    checks = look(ready, Box())
    broken = [
        check for check in checks.values() if check.group == "config" and check.state == FAILED
    ]
    assert ["is no multiple of training's TP 1 x EP 16" in check.found for check in broken] == [
        True
    ]
    assert f"python tools/plan_layout.py --config-name {NAME}" in broken[0].fix
    assert checks["memory of an NPU"].state == checks["disk for the run"].state == SKIPPED


def test_a_broken_rule_is_one_line(ready, monkeypatch):
    """Also where the engine's own check names it."""
    from mindspeed_qerl.ascend import limits

    ready["generate_config"]["infer_expert_parallel_size"] = 8
    message = "infer TP 1 x EP 8 = 8 is no multiple of training's TP 1 x EP 16 = 16"
    faults = [
        Fault("layout", f"{message} (a source)"),
        Fault("unsupported", "run.name is wrong", "run.name"),
    ]
    monkeypatch.setattr(limits, "validate", lambda recipe: faults)
    failed = [check.found for check in look(ready, Box()).values() if check.state == FAILED]
    assert sum(message in found for found in failed) == 1 and "run.name is wrong" in failed


def test_values_that_make_no_layout(ready):
    ready["actor_config"]["micro_batch_size"] = "four"
    checks = look(ready, Box())
    assert any(
        "'four' must be int" in check.found and check.state == FAILED for check in checks.values()
    )
    for name in ("layout", "memory of an NPU", "disk for the run", "base weights"):
        assert checks[name].state == SKIPPED


def test_a_rollout_that_leaves_no_cache(ready):
    ready["generate_config"]["gpu_memory_utilization"] = 0.2
    check = look(ready, Box())["memory of an NPU"]
    assert check.state == FAILED and "left for its KV cache" in check.found


@pytest.mark.parametrize(
    "described",
    [
        {"rope_theta": 1e7},
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}, "rope_theta": 1e7},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
    ],
    ids=["transformers 4", "both", "transformers 5"],
)
def test_the_rotary_base_of_another_model(ready, described):
    """The YAML has the original's, the directory is the Instruct-2507 model's."""
    file = Path(ready["megatron_training"]["tokenizer_name_or_path"]) / "config.json"
    file.write_text(
        json.dumps(
            {key: value for key, value in {**QWEN3_MOE, **described}.items() if value is not None}
        )
    )
    checks = look(ready, Box())
    unread = described["rope_theta"] is None  # by the transformers of NPUs, which is 4
    assert not_passed(checks) == {"rotary base": FAILED, **({"shape": FAILED} if unread else {})}
    assert ('Write "rope_theta": 10000000.0' in checks["shape"].found) == unread
    assert re.match(
        "rotary_base = 1000000 in the config, but rope_theta = 10000000.0 in /.*/config.json",
        checks["rotary base"].found,
    )
    override = checks["rotary base"].fix.split()[0]
    assert compose(NAME, [override])["model"]["qwen3_30b_a3b"]["rotary_base"] == 10_000_000


def test_another_shape(ready):
    file = Path(ready["megatron_training"]["tokenizer_name_or_path"]) / "config.json"
    file.write_text(json.dumps({**QWEN3_MOE, "num_experts_per_tok": 4}))
    checks = look(ready, Box())
    assert (
        not_passed(checks) == {"shape": FAILED}
        and "moe_router_topk = 8 in the config, but num_experts_per_tok = 4"
        in checks["shape"].found
    )


def test_a_model_that_is_not_there(ready, tmp_path):
    model = Path(ready["megatron_training"]["tokenizer_name_or_path"])
    model.rename(tmp_path / "elsewhere")
    checks = look(ready, Box())
    assert (
        not_passed(checks) == {"config.json": FAILED}
        and "export MODELS=" in checks["config.json"].fix
    )
    (tmp_path / "elsewhere").rename(model)
    (model / "model-1.safetensors").unlink()
    (model / "tokenizer_config.json").write_text("{}")
    checks = look(ready, Box())
    assert (
        not_passed(checks) == {"weights": WARNING, "tokenizer": WARNING}
        and "0 of 1 files: model-1.safetensors" in checks["weights"].found
    )


# ---- data ----


def test_data_that_is_not_there(ready):
    train, test = Path(ready["megatron_training"]["data_path"]), Path(ready["task"]["test_file"])
    for file in (*train.parent.glob("*"), test):
        file.unlink()
    checks = look(ready, Box())
    assert not_passed(checks) == {
        "training files": FAILED,
        "test rows": FAILED,
        "train and test": SKIPPED,
    }
    model = ready["megatron_training"]["tokenizer_name_or_path"]
    assert shlex.split(checks["training files"].fix) == shlex.split(
        f"python tools/convert_gsm8k.py --input openai/gsm8k --output {train.parent} --format "
        f"mindspeed --tokenizer {model} --max-prompt-length 512"
    )
    assert (
        checks["test rows"].fix
        == f"python tools/convert_gsm8k.py --input openai/gsm8k --output {test.parent}"
    )


def test_prompts_that_are_too_long(ready):
    train = ready["megatron_training"]["data_path"]
    write_packed(
        train, {"input_ids": [[1] * (511 + i % 2) for i in range(200)], "labels": [[1]] * 200}
    )
    check = look(ready, Box())["prompt lengths"]  # upstream keeps what is shorter than 512: a half
    assert (
        check.state == WARNING
        and "100 of 200 have max_prompt_length = 512 tokens or more" in check.found
    )
    assert check.fix.startswith("rl_config.max_prompt_length=513 ")
    write_packed(train, {"input_ids": [[1] * 600] * 137 + [[1]] * 63, "labels": [[1]] * 200})
    check = look(ready, Box())["prompt lengths"]
    assert check.state == FAILED and "fewer than one batch of 64" in check.found


@pytest.mark.parametrize(
    "rows, name, found",
    [
        ({"labels": [[1]] * 79}, "training files", "80 prompts and 79 labels"),
        ({"labels": [[1]] * 79 + [[]]}, "labels", "1 of 80 are empty"),
        (
            {"input_ids": [[1, 151936]] * 80},
            "token ids",
            "up to 151936, and the model's vocabulary has 151,936",
        ),
    ],
)
def test_data_that_does_not_fit(ready, rows, name, found):
    write_packed(ready["megatron_training"]["data_path"], rows)
    checks = look(ready, Box())
    assert (
        not_passed(checks) == {name: FAILED}
        and found in checks[name].found
        and "convert_gsm8k.py" in checks[name].fix
    )


def test_data_that_was_cut(ready):
    prefix = f"{ready['megatron_training']['data_path']}_packed_labels_document"
    Path(f"{prefix}.bin").write_bytes(b"1234")
    assert "has 4 bytes, its index 320" in look(ready, Box())["training files"].found
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX")
    assert "is not the index" in look(ready, Box())["training files"].found


def test_packed_files_are_read_as_megatron_reads_them(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    rows = [[5, 6, 7], [], [8]]
    write_packed(tmp_path / "x", {"labels": rows})
    lengths, tokens = read_packed(f"{tmp_path}/x_packed_labels_document")
    theirs = IndexedDataset(f"{tmp_path}/x_packed_labels_document")
    assert lengths.tolist() == theirs.sequence_lengths.tolist() == [
        3,
        0,
        1,
    ] and tokens.tolist() == [5, 6, 7, 8]


# ---- base weights ----


@pytest.mark.parametrize(
    "sizes, names",
    [
        ((1, 1, 8), [f"mp_rank_00_{e:03d}" for e in range(8)]),
        ((2, 1, 1), ["mp_rank_00", "mp_rank_01"]),
        ((4, 3, 1), [f"mp_rank_0{t}_00{p}" for t in range(4) for p in range(3)]),
        (
            (2, 2, 2),
            [
                "mp_rank_00_000_000",
                "mp_rank_00_000_001",
                "mp_rank_00_001_000",
                "mp_rank_00_001_001",
                "mp_rank_01_000_000",
                "mp_rank_01_000_001",
                "mp_rank_01_001_000",
                "mp_rank_01_001_001",
            ],
        ),
    ],
)
@pytest.mark.parametrize("tracker", ["1", "release"])
def test_the_files_of_a_layout(ready, tmp_path, sizes, names, tracker):
    """As megatron/training/checkpointing.py:get_checkpoint_name names them."""
    for kind, size in zip(("tensor", "pipeline", "expert"), sizes):
        ready["actor_config"][f"{kind}_model_parallel_size"] = size
    ready["actor_config"]["load"] = str(tmp_path / "base")
    write_checkpoint(tmp_path / "base", names, tracker)
    check = look(ready, Box())["base weights"]
    assert check.state == PASSED and check.found.startswith(
        f"{len(names)} of {len(names)} files for TP {sizes[0]} PP {sizes[1]} EP {sizes[2]}"
    )


def test_base_weights_of_another_layout(ready, tmp_path):
    ready["actor_config"]["load"] = str(tmp_path / "base")
    write_checkpoint(tmp_path / "base", [f"mp_rank_00_{e:03d}" for e in range(8)])
    checks = look(ready, Box())
    assert not_passed(checks) == {"base weights": FAILED}
    assert (
        "has 8 files, mp_rank_00_000 to mp_rank_00_007; TP 1 PP 1 EP 16 needs 16 files, "
        "mp_rank_00_000 to mp_rank_00_015: another layout" in checks["base weights"].found
    )
    assert "--target-expert-parallel-size 16" in checks["base weights"].fix
    write_checkpoint(
        tmp_path / "more", [f"mp_rank_00_{e:03d}" for e in range(32)]
    )  # all that are needed, and others
    ready["actor_config"]["load"] = str(tmp_path / "more")
    assert look(ready, Box())["base weights"].found.endswith("another layout")


def test_base_weights_that_are_missing_or_cut(ready):
    load = Path(ready["actor_config"]["load"])
    (load / "iter_0000001" / "mp_rank_00_003" / "model_optim_rng.pt").write_bytes(b"PK")
    check = look(ready, Box())["base weights"]
    assert check.state == FAILED and "mp_rank_00_003/model_optim_rng.pt is not whole" in check.found
    (load / "latest_checkpointed_iteration.txt").unlink()
    check = look(ready, Box())["base weights"]
    assert check.state == FAILED and "not converted yet" in check.found
    assert shlex.join(conversion_command(read(ready)[0])) in check.fix


def page_conversions() -> dict[str, list[str]]:
    """config -> the command that docs/ascend.md gives (tests/upstream/test_configs.py runs them)."""
    text = (ROOT / "docs" / "ascend.md").read_text().replace("\\\n", " ")
    return {
        name: shlex.split(command)
        for name, command in re.findall(
            r"^# (grpo_\w+):.*\n(python convert_ckpt.*)$", text, re.MULTILINE
        )
    }


@pytest.mark.parametrize("name", page_conversions())
def test_the_conversion_is_the_guides(name, monkeypatch):
    monkeypatch.setenv("MODELS", "/models")
    assert conversion_command(read_recipe(compose(name))) == [
        word.replace("$MODELS", "/models") for word in page_conversions()[name]
    ]


def test_a_conversion_for_tensor_parallel_experts_and_stages(ready):
    """Whole experts on tensor ranks have an option of their own; at TP 1 convert_ckpt_v2.py refuses
    it.
    """
    assert "--moe-tp-extend-ep" not in conversion_command(read(ready)[0])
    ready["actor_config"] |= {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "num_layer_list": "23,25",
    }
    command = " ".join(conversion_command(read(ready)[0]))
    assert (
        "--moe-tp-extend-ep --target-tensor-parallel-size 4 --target-pipeline-parallel-size 2 "
        "--target-expert-parallel-size 2 --num-layer-list 23,25"
    ) in command
    ready["actor_config"]["load"] = None
    with pytest.raises(ConfigError, match="actor_config.load is not set"):
        conversion_command(read(ready)[0])


def test_the_family_is_that_of_the_config_json(ready):
    """Of the Megatron arguments only while there is none."""
    file = Path(ready["megatron_training"]["tokenizer_name_or_path"]) / "config.json"
    file.write_text(json.dumps({**QWEN3_MOE, "model_type": "gemma2"}))
    with pytest.raises(
        ConfigError, match="Qwen3-30B-A3B: unknown model_type 'gemma2'. Known: llama, qwen2"
    ):
        conversion_command(read(ready)[0])
    file.unlink()
    assert "qwen3-moe" in conversion_command(read(ready)[0])


# ---- other engines ----


def test_emulated_npus(ready):
    checks = look(
        {**ready, "emulate_npu": True},
        Box(smi=None, davinci=0, acl=None, environment={}, logical_cpus=2, hangs=("ray", "npu")),
    )
    assert not_passed(checks) == dict.fromkeys(
        ["ranks", "ports", "host memory", "jemalloc", "CANN's paths", "imports of a worker"],
        SKIPPED,
    )


def test_a_rehearsal(ready):
    """Of a config for NPUs: its layout and its data count, the model and the weights are its own."""
    raw = {**ready, "engine": "local", "rehearsal": {"enabled": True}}
    box = Box(
        smi=None, davinci=0, acl=None, environment={}, packages={}, reports=[], hangs=("ray", "npu")
    )
    checks = look(raw, box)
    assert {check.state for check in checks.values()} == {PASSED, SKIPPED}
    assert checks["layout"].state == checks["training rows"].state == PASSED
    raw["actor_config"]["expert_model_parallel_size"] = 3
    assert FAILED in {check.state for check in look(raw, box).values() if check.group == "config"}


def test_the_local_engine(tmp_path):
    raw = compose(
        "grpo_tiny_moe_cpu",
        [
            f"megatron_training.tokenizer_name_or_path={tmp_path}",
            f"task.test_file={tmp_path}/no.parquet",
        ],
    )
    checks = look(
        raw,
        Box(
            smi=None,
            davinci=0,
            acl=None,
            environment={},
            packages={},
            reports=[],
            hangs=("ray", "npu"),
        ),
    )
    assert {name for name, state in not_passed(checks).items() if state == FAILED} >= {
        "config.json",
        "test rows",
    }
    assert (
        checks["ranks"].state == checks["base weights"].state == checks["layout"].state == SKIPPED
    )


# ---- what only a played machine can be asked ----


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
    one = "/sys/fs/cgroup/memory/docker/x/memory"
    files = {
        "/proc/self/cgroup": "11:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n0::/\n",
        f"{one}.limit_in_bytes": "64000000000",
        f"{one}.usage_in_bytes": "4000000000",
        f"{one}.stat": "inactive_file 1\ntotal_inactive_file 2000000000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
    }
    assert cgroup_room(files.get) == {f"{one}.limit_in_bytes = 64.0 GB": 62 * 10**9}
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
    assert Machine().memory()["MemAvailable"] == pytest.approx(
        psutil.virtual_memory().available, rel=0.2
    )


def test_the_memory_of_a_conversion(ready):
    (Path(ready["actor_config"]["load"]) / "latest_checkpointed_iteration.txt").unlink()
    for room, state in (
        (130, PASSED),
        (70, WARNING),
        (60, FAILED),
    ):  # 61.1 GB of weights, once and twice
        checks = look(ready, Box(room={"MemAvailable": room * 10**9}))
        assert checks["memory to convert"].state == state
        assert "the converter holds 61.1 GB of weights" in checks["memory to convert"].found
    assert "memory to convert" not in look(
        {**ready, "actor_config": {**ready["actor_config"], "load": None}}, Box()
    )


def test_the_memory_of_files_that_all_ranks_read_at_once(ready):
    """16 ranks, expert parallel: the experts once, all else 16 times."""
    experts = (
        48 * 128 * 3 * 2048 * 768 * 2
    )  # layers, experts, matrices, hidden, intermediate; bytes of bfloat16
    files = (experts + 16 * (61.1e9 - experts)) / 1e9
    for room, state in (
        (files + 16 * 4 + 2, PASSED),
        (files + 2, WARNING),
        (files - 2, FAILED),
    ):  # 4 GB a process
        assert (
            look(ready, Box(room={"MemAvailable": int(room * 10**9)}))["host memory"].state == state
        )


@pytest.mark.parametrize(
    "value, known",
    [
        ("eth0", True),
        ("eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("eth7,eth0", True),
        ("^eth", True),
        ("^eth,lo", False),
        ("eth7", False),
    ],
)
def test_the_interfaces_of_hccl(ready, value, known):
    box = Box()
    box.environment["HCCL_SOCKET_IFNAME"] = value
    assert ("HCCL_SOCKET_IFNAME" in look(ready, box)) != known
    box.environment["GLOO_SOCKET_IFNAME"] = value
    assert ("GLOO_SOCKET_IFNAME" in look(ready, box)) != (value in ("eth0", "eth7,eth0", "^eth,lo"))


def test_ports_that_the_kernel_keeps_are_not_drawn(ready):
    names = ("ip_local_port_range", "ip_local_reserved_ports")
    for texts, state in (
        (("1024\t65535\n", "\n"), WARNING),
        (("1024\t65535\n", "8080,12345-12360\n"), PASSED),
        (("1024\t65535\n", "12345-12359\n"), WARNING),
        (("32768\t60999\n", "\n"), PASSED),
    ):
        files = {f"/proc/sys/net/ipv4/{name}": text for name, text in zip(names, texts)}
        assert look(ready, Box(files=files))["ports of HCCL"].state == state


def test_a_joined_ray_of_two_nodes(ready):
    """Upstream's groups are as wide as what the driver's node shows to CANN, and Ray must have such
    a node.
    """

    def two(acl: int, **more) -> Box:
        return Box(
            smi=npu_smi(16), acl=acl, ray=cluster(16, cpus=640, nodes=2, **more), raylets={7: {}}
        )

    assert look(ready, two(8), nodes=2)["dies of a node"].state == PASSED
    assert look(ready, two(16), nodes=2)["dies of a node"].state == FAILED
    jobs = ("process 7 on 10.0.0.2 since 2026-01-01 10:00 (python train.py)",)
    held = look(ready, two(8, free=8, jobs=jobs), nodes=2)
    assert "of which 8 are free; the others are held by process 7 on 10.0.0.2" in held["Ray"].found
    assert held["Ray"].state == FAILED


@pytest.mark.parametrize("left_out", [key for key in compose(NAME)["model"]["qwen3_30b_a3b"]])
def test_a_key_that_the_models_yaml_leaves_out(ready, left_out):
    """Megatron's own default takes its place: a failed line, unless that is what config.json says,
    or it says nothing of the model.
    """
    del ready["model"]["qwen3_30b_a3b"][left_out]
    same = {
        "ffn_hidden_size",
        "max_position_embeddings",
        "make_vocab_size_divisible_by",
        "attention_softmax_in_fp32",
        "no_gradient_accumulation_fusion",
        "moe_router_load_balancing_type",
        "use_mcore_models",
    }
    failed = [check for check in look(ready, Box()).values() if check.state == FAILED]
    assert bool(failed) != (left_out in same), failed
    assert all(left_out in check.found for check in failed)


# ---- the parser, the table, the command ----


def test_npu_smi_of_a_910c():
    found = dies(npu_smi(16, health={3: "Alarm"}, used={15: 31877}))
    assert [(die.card, die.chip) for die in found] == [(i // 2, i % 2) for i in range(16)]
    assert [die.health for die in found] == ["OK"] * 3 + ["Alarm"] + ["OK"] * 12
    assert (found[15].used, found[15].total) == (31877, 65536)


def test_npu_smi_of_a_910b():
    table = (
        HEAD.replace("Chip  Phy-ID", "Chip        ")
        + """\
| 0     910B2               | OK            | 96.4        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3397 / 65536         |
+===========================+===============+====================================================+
"""
        + TAIL
    )
    assert [asdict(die) for die in dies(table)] == [
        dict(card=0, chip=0, number=0, health="OK", used=3397, total=65536)
    ]
    assert dies("nothing of the kind") == dies("") == []


# First lines and dies of public reports: 26.0 (vllm-ascend issue 12980), 310P on 24.1
# (Ascend/pytorch issue 94), 310P and 310B on 23.0, and others in their manner.
FORMS = {
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
        (5, 0, 5, "General Warning", None, None),
        [],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_npu_smi(form):
    table, die, held = FORMS[form]
    [found] = dies(table)
    assert tuple(asdict(found).values()) == die
    assert processes(table) == (None if held is None else {die[2]: held} if held else {})


def test_no_form_of_npu_smi_breaks_the_preflight():
    """Columns and rows taken away, one at a time, from every form: what is left is read, or not."""
    for table, *_ in FORMS.values():
        lines = table.splitlines()
        for number, line in enumerate(lines):
            cells = line.split("|")
            for place in range(len(cells)):
                fewer = "|".join(cells[:place] + cells[place + 1 :])
                changed = "\n".join([*lines[:number], fewer, *lines[number + 1 :]])
                dies(changed), processes(changed)
        for title in re.findall(r"[A-Z][\w-]+", table):
            dies(table.replace(title, "")), processes(table.replace(title, ""))


@pytest.mark.parametrize(
    ("words", "state", "found"),
    [
        (["ok"] * 16, PASSED, "16 dies, all healthy"),
        (["正常"] * 16, PASSED, "16 dies, all healthy"),
        (["Warning"] * 16, WARNING, "16 dies; of 16 the health is 'Warning'"),
        (
            ["OK"] * 15 + ["Gut"],
            WARNING,
            "16 dies; of 1 the health is 'Gut', which is not known here",
        ),
        (["CRITICAL"] + ["OK"] * 15, FAILED, "16 dies, 1 not healthy: NPU 0 chip 0: CRITICAL"),
        (["异常"] + ["OK"] * 15, FAILED, "16 dies, 1 not healthy: NPU 0 chip 0: 异常"),
    ],
)
def test_words_for_health(ready, words, state, found):
    checks = look(ready, Box(smi=npu_smi(16, health=dict(enumerate(words)))))
    assert checks["npu-smi"].state == state and checks["npu-smi"].found.startswith(found)
    assert (checks["ranks"].state == FAILED) == (state == FAILED)


def test_what_npu_smi_does_not_tell_is_a_warning_once(ready):
    table = (
        npu_smi(16)
        .replace("HBM-Usage(MB)", "")
        .replace("Memory-Usage(MB)", "")
        .replace("Process id", "PID")
    )
    checks = look(ready, Box(smi=table))
    assert not_passed(checks) == {"npu-smi": WARNING}
    assert checks["npu-smi"].found == (
        "16 dies, all healthy; of 16 no memory is told; processes on them are not told"
    )


def test_dies_that_the_container_has_under_other_names(ready):
    """16 nodes named 0 to 15, and Phy-IDs of 16 to 31: all are used."""
    table = re.sub(
        r"(?m)^\| ([01])     (\d+)( +\| 0000)",
        lambda row: f"| {row[1]}     {int(row[2]) + 16}{row[3]}",
        npu_smi(16, health={3: "Alarm"}),
    )
    check = look(ready, Box(smi=table + PROCESS))
    assert (
        check["npu-smi"].state == FAILED and "the run would use davinci19" in check["npu-smi"].found
    )
    assert check["processes on the dies"].found.startswith("davinci17: ")
    taken = look(ready, Box(smi=table, taken=(12345 + 30,)))["ports of HCCL"]
    assert taken.state == FAILED and taken.found == "12345 to 12376: 12375 taken"


SIXTEEN = ",".join(map(str, range(16)))


@pytest.mark.parametrize(
    ("given", "state", "found"),
    [
        (SIXTEEN, PASSED, "16 entries"),
        (f"{SIXTEEN},15", FAILED, "15 is there more than once"),
        (f"{SIXTEEN},", FAILED, "'' is no number of a die"),
        (f"{SIXTEEN}, 16", FAILED, "' 16' is no number of a die"),
        (
            "0-15",
            FAILED,
            (
                "1 entries: 0-15; '0-15' is no number of a die: ASCEND_RT_VISIBLE_DEVICES has "
                "neither ranges"
            ),
        ),
        (f"{SIXTEEN},99", WARNING, "there are 16 dies, from 0 on, and no 99"),
    ],
)
def test_the_whole_list_is_read(ready, given, state, found):
    box = Box()
    box.environment["ASCEND_RT_VISIBLE_DEVICES"] = given
    check = look(ready, box)["ASCEND_RT_VISIBLE_DEVICES"]
    assert check.state == state and found in check.found


@pytest.mark.parametrize(
    ("given", "warned"), [("0-15", False), (SIXTEEN, False), ("0-7", True), ("void", False)]
)
def test_the_list_of_the_containers_runtime(ready, given, warned):
    box = Box()
    box.environment["ASCEND_VISIBLE_DEVICES"] = given
    assert ("ASCEND_VISIBLE_DEVICES" in look(ready, box)) == warned


@pytest.mark.parametrize(
    ("shell", "name", "found"),
    [
        ({"HCCL_IF_BASE_PORT": "20000"}, "ports of HCCL", "20002 to 20015 are Ray's workers too"),
        (
            {"HCCL_IF_BASE_PORT": "19988"},
            "ports of HCCL",
            "19988 to 20003: 20002 to 20003 are Ray's workers too",
        ),
        ({"HCCL_IF_BASE_PORT": "19986"}, "", ""),
        ({"HCCL_IF_BASE_PORT": "30000"}, "", ""),
        (
            {"RAY_PORT": "12350"},
            "ports of HCCL",
            "12350 is Ray's head (RAY_PORT=12350) too; 12351 is Ray's client",
        ),
        ({"RAY_PORT": "12344"}, "ports of HCCL", "12345 is Ray's client server"),
        ({"RAY_PORT": "12361"}, "", ""),
        (
            {"RAY_PORT": "20001"},
            "ports of Ray",
            "Ray's client server (RAY_PORT + 1) is among Ray's workers",
        ),
        ({"RAY_PORT": "52364"}, "ports of Ray", "is Ray's dashboard agent too"),
        ({"HCCL_IF_BASE_PORT": "52360"}, "ports of HCCL", "52365 is Ray's dashboard agent too"),
    ],
)
def test_ports_of_the_launchers_ray_against_hccls(ready, shell, name, found):
    box = Box()
    box.environment |= shell
    checks = {check.name: check for check in preflight(ready, NAME, box, own_ray=True)}
    failed = [check.name for check in checks.values() if check.state == FAILED]
    assert failed == [name] * bool(name) and found in checks[name or "ports of HCCL"].found


def test_ports_of_the_workers_of_a_ray_that_runs(ready):
    """Ray gives them out in order: only the first count."""
    for first, state in ((10002, PASSED), (12000, WARNING), (12361, PASSED), (0, PASSED)):
        words = f"raylet\0--min_worker_port={first}\0--max_worker_port=19999\0"
        box = Box(ray=cluster(16), raylets={7: {}}, files={"/proc/7/cmdline": words})
        assert look(ready, box)["ports of HCCL"].state == state


@pytest.mark.parametrize(
    ("given", "taken", "state", "found"),
    [
        ("60000-60050", (60003,), PASSED, "60000 to 60050 are free"),
        ("auto", (), PASSED, "HCCL takes what is free"),
        ("60000-60003", (), FAILED, "has fewer ports than the 16 ranks"),
        ("60000 - x", (), FAILED, "must be auto, or"),
        ("60000-60015", (60003,), FAILED, "60003 taken"),
        ("1-99999", (), FAILED, "must be auto, or"),
        ("60050-60000", (), FAILED, "must be auto, or"),
    ],
)
def test_the_range_of_hccls_ports(ready, given, taken, state, found):
    box = Box(taken=taken)
    box.environment["HCCL_HOST_SOCKET_PORT_RANGE"] = given
    check = look(ready, box)["ports of HCCL"]
    assert check.state == state and found in check.found


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("local", "none is running"),
        ("", "none is running"),
        ("auto", "none is running"),
        ("10.0.0.9:6379", "one is running with 16"),
        ("[fd00::5]:6379", "one is running with 16"),
        ("10.0.0.8:6379", "nothing listens there"),
        ("ray://10.0.0.9:10001", "Ray's client cannot"),
        ("anyscale://c", "it must be HOST:PORT"),
        ("fd00::5:6379", "it must be HOST:PORT"),
        ("head", "must be HOST:PORT"),
        (" 10.0.0.9:6379", "must be HOST:PORT"),
        ("10.0.0.9:99999", "must be HOST:PORT"),
        ("10.0.0.9:", "must be HOST"),
    ],
)
def test_addresses_of_ray(ready, address, found, monkeypatch):
    """A Ray is asked only where one listens, by that address; none is ever started."""
    asked = []
    monkeypatch.setattr(
        Box,
        "run",
        lambda box, command, timeout=20, environment=None, run=Box.run: (
            asked.extend(command[3:]) if "ray.init" in " ".join(command) else None,
            run(box, command, timeout, environment),
        )[1],
    )
    box = Box(ray=cluster(16), listening=(("10.0.0.9", 6379), ("fd00::5", 6379)))
    box.environment["RAY_ADDRESS"] = address
    assert found in look(ready, box)["Ray"].found
    assert asked == ([address] if found.startswith("one is") else [])


@pytest.mark.parametrize(
    "value",
    [
        "fd00::5",
        "127.0.0.1",
        "0.0.0.0",
        "10.0.0.1:6380",
        "host-1",
        "010.0.0.1",
        " 10.0.0.1",
        "224.0.0.1",
        "10.0.0.1/24",
    ],
)
def test_addresses_that_nodes_cannot_have(ready, value):
    box = Box(smi=npu_smi(8), davinci=8, acl=8)
    for name in ("NODE_ADDR", "MASTER_ADDR"):
        box.environment = {**Box().environment, name: value}
        checks = {check.name: check for check in preflight(ready, NAME, box, nodes=2, own_ray=True)}
        assert (name in checks) != (
            name == "MASTER_ADDR" and value == "host-1"
        )  # only Ray connects there
        box.environment[name] = "10.0.0.1"
        assert name not in {
            check.name for check in preflight(ready, NAME, box, nodes=2, own_ray=True)
        }


def test_the_address_of_hccl_is_compared_as_an_address(ready):
    box = Box()
    for value, known in (
        ("FE80::0:1", True),
        ("fe80::1%eth0", True),
        ("10.0.0.1", True),
        ("10.0.0.2", False),
    ):
        box.environment["HCCL_IF_IP"] = value
        assert ("HCCL_IF_IP" in look(ready, box)) != known


def test_places_that_are_made_must_be_writable(ready, monkeypatch):
    """Before anything is converted; what is there already is only read."""
    load, data = Path(ready["actor_config"]["load"]), Path(ready["task"]["test_file"])
    monkeypatch.setattr(Box, "writable", lambda box, path: Path(path) not in (load, data.parent))
    assert not_passed(look(ready, Box())) == {}
    (load / "latest_checkpointed_iteration.txt").unlink()
    check = look(ready, Box())["disk for the base"]
    assert check.state == FAILED and f"{load} cannot be written" in check.found
    data.unlink()
    assert look(ready, Box())["disk for the data"].state == FAILED


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("expandable_segments:True", ""),
        (" expandable_segments : True ,", ""),
        ("", ""),
        ("max_split_size_mb:256", ""),
        ("expandable_segments:False,max_split_size_mb:256", ""),
        ("page_size:1g,expandable_segments:True", ""),
        ("garbage_collection_threshold:0.8", ""),
        ("max_split_size_mb:256, expandable_segments: True", "them together"),
        ("expandable_segments:True,garbage_collection_threshold : 0.9", "them together"),
        ("expandable_segments:true", "only True or False"),
        ("expandable_segments:1", "only True or False"),
        ("expandable_segments", "takes no ''"),
        ("Expandable_segments:True", "did you mean 'expandable_segments'"),
        ("expandable_segments=True", "unknown option"),
        ("max_split_size_mb:20", "takes no '20'"),
        ("garbage_collection_threshold:1.5", "takes no '1.5'"),
        ("max_split_size_mb:x", "takes no 'x'"),
        ("expandable_segments:True,,max_split_size_mb:256", "unknown option"),
    ],
)
def test_the_grammar_of_torch_npus_allocator(text, fault):
    """Of NPUCachingAllocator.cpp: lexArgs and parseArgs."""
    found = allocator_fault(text)
    assert fault in found and bool(found) == bool(fault)


PLAYED = {  # docs/preflight.md shows these
    "A list of twelve": Box(environment={**Box().environment, "ASCEND_RT_VISIBLE_DEVICES": TWELVE}),
    "A container with twelve device nodes": Box(davinci=12, acl=12),
    "A Ray that was started with another environment": Box(
        ray=cluster(12), raylets={4242: {"ASCEND_RT_VISIBLE_DEVICES": TWELVE}}
    ),
    "A die that does not come up": Box(acl=15),
}


def played(box: Box, monkeypatch) -> str:
    """The NPUs' part of the table on that box, as it is printed where the output is no terminal."""
    from rich.console import Console

    monkeypatch.setenv("MODELS", "/data/models")
    console = Console(file=io.StringIO(), width=110)
    print_table(
        [check for check in preflight(compose(NAME), NAME, box) if check.group == "NPUs"],
        f"Preflight of {NAME}",
        console,
    )
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


@pytest.mark.parametrize("title", PLAYED)
def test_the_page_shows_what_is_printed(title, monkeypatch):
    page = (ROOT / "docs" / "preflight.md").read_text()
    assert f"**{title}**" in page and played(PLAYED[title], monkeypatch) in page


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


def test_exit_status(ready, tool, tmp_path, capsys):
    arguments = ("--config-name", NAME, f"run.root={tmp_path / 'runs'}")
    assert tool(Box(), *arguments) == 0
    assert tool(Box(limit=1024), *arguments) == 0  # a warning is none
    assert tool(Box(acl=15), *arguments) == 1
    for wrong in (
        ("--config-name", "grpo_qwen3_30b_a3b_gsm8k_16np"),
        ("--config-name", NAME, "no_such.key=1"),
        (),
        ("--config-name", NAME, "--nodes", "0"),
    ):
        with pytest.raises(SystemExit) as refused:
            tool(Box(), *wrong)
        assert refused.value.code == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((NAME, "engine=foo"), r"unknown engine 'foo'.* Known: local, mindspeed_rl"),
        ((NAME, "engine=null"), r"unknown engine 'None'.* Known: local, mindspeed_rl"),
        (
            ("model/qwen3_30b_a3b",),
            r"unknown config name 'model/qwen3_30b_a3b'. 14 are known: `python cli/train_grpo.py` lists them",
        ),
        (
            ("../configs/grpo_tiny_moe_cpu",),
            (
                r"unknown config name '../configs/grpo_tiny_moe_cpu', did you mean 'grpo_tiny_moe_cpu' or "
                r"'grpo_steps_moe_cpu'\? 14 are known: "
            ),
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
            (
                r"tp1-pp1-ep16 is named after another layout than the config's TP 1 PP 1 EP 8.*: set "
                r"actor_config.load=\S+/Qwen3-30B-A3B-tp1-pp1-ep8$"
            ),
        ),
    ],
)
def test_what_is_refused_before_anything_is_checked(ready, tool, capsys, arguments, said):
    with pytest.raises(SystemExit) as refused:
        tool(Box(), "--config-name", *arguments)
    told = capsys.readouterr()
    assert refused.value.code == 2 and told.out == "" and re.search(said, told.err, re.MULTILINE), (
        told.err
    )


def test_print_conversion(ready, tool, capsys):
    assert tool(Box(), "--config-name", NAME, "--print-conversion") == 0
    assert shlex.split(capsys.readouterr().out) == conversion_command(read(ready)[0])


def test_an_illegal_layout_gets_no_conversion_command(ready):
    ready["actor_config"] |= {"tensor_model_parallel_size": 3, "load": "not/converted"}
    assert "convert_ckpt" not in look(ready, Box())["base weights"].fix


def test_the_table(ready, tool, capsys):
    assert tool(Box(acl=15), "--config-name", NAME) == 1
    output = capsys.readouterr().out
    for group in GROUPS:
        assert re.search(rf"^│ {group} ", output, re.MULTILINE)
    assert "No NPU here" not in output and output.rstrip().splitlines()[-1].startswith(
        "2 failed, 1 warning, "
    )
    assert {len(line) for line in output.splitlines() if line.startswith(("┏", "│", "└"))} == {110}
    numbers = re.findall(r"(?:failed|warning) \[(\d+)\]", output)
    assert numbers and numbers == re.findall(r"^\[(\d+)\] ", output, re.MULTILINE)
    assert tool(Box(smi=None, davinci=0, acl=None), "--config-name", NAME) == 1
    assert capsys.readouterr().out.startswith("No NPU here")


def test_a_command_to_type_is_one_line(ready, tool, capsys):
    (Path(ready["actor_config"]["load"]) / "latest_checkpointed_iteration.txt").unlink()
    tool(Box(), "--config-name", NAME)
    assert (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {shlex.join(conversion_command(read(ready)[0]))}"
        in capsys.readouterr().out
    )


def test_json(ready, tool, capsys):
    tool(Box(acl=15), "--config-name", NAME, "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["config"] == NAME and told["summary"].startswith("2 failed")
    assert next(check for check in told["checks"] if check["state"] == FAILED)["name"] == "ranks"
    assert set(told["checks"][0]) == {"name", "state", "found", "fix", "group"}


def test_a_check_that_breaks_is_a_failed_line(ready):
    def broken(_):
        raise RuntimeError("no such thing")

    box = Box()
    box.port_free = broken
    checks = {check.name: check for check in preflight(ready, NAME, box)}
    assert (
        checks["ports"].state == FAILED
        and "could not be checked: RuntimeError: no such thing" in checks["ports"].found
    )
    assert checks["base weights"].state == PASSED


# ---- the real machine ----


def test_the_tool_on_this_machine(ready):
    """A process of its own, in a Python that has imported nothing: no torch is imported, and it
    ends whatever this machine lacks.
    """
    program = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\ntry:\n    runpy.run_path(sys.argv[0], "
        "run_name='__main__')\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            str(ROOT / "tools" / "preflight.py"),
            "--config-name",
            NAME,
            "--json",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == (
        1 if any(check["state"] == FAILED for check in told.values()) else 0
    ), done.stderr
    assert "Assertion" not in done.stderr
    assert (
        told["rotary base"]["state"]
        == told["test rows"]["state"]
        == told["base weights"]["state"]
        == PASSED
    )
    assert not any("could not be checked" in check["found"] for check in told.values())


def test_the_fake_answers_what_the_machine_answers():
    public = {name for name in dir(Machine) if not name.startswith("_")}
    assert public <= set(dir(Box()))


def test_this_machine(tmp_path):
    machine = Machine()
    assert machine.run([sys.executable, "-c", "print('yes')"]) == "yes\n"
    assert 1 <= machine.cpus() <= os.cpu_count()
    assert machine.open_files() > 0 and 1 <= machine.may_use() <= os.cpu_count()
    assert machine.user() == getpass.getuser()
    assert (
        0 < machine.threads()["kernel.threads-max"]
        and machine.python_version == sys.version_info[:2]
    )
    assert (
        0
        < machine.disk_free(tmp_path / "not" / "made" / "yet")
        == pytest.approx(machine.disk_free(tmp_path), rel=0.1)
    )
    assert 0 < machine.disk_left(tmp_path / "not" / "made" / "yet") < 1 and machine.may_execute(
        tmp_path
    )
    assert machine.closed("/dev/null") == "" and machine.closed("/dev/no-such") == "is not there"
    assert (
        machine.version("pytest") == pytest.__version__
        and machine.version("no-such-package") is None
    )
    assert "pytest" in machine.entry_points("console_scripts")
    assert machine.importable("json") and not machine.importable("no_such_module")
    (tmp_path / "file").write_text("text")
    assert (
        machine.glob(f"{tmp_path}/fi*") == [f"{tmp_path}/file"]
        and machine.read(f"{tmp_path}/file") == "text"
        and machine.read("/no/such") is None
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not machine.port_free(port)
    assert machine.port_free(port)
    assert all(report.pin in PINS.values() for report in machine.upstream())


def test_processes_of_this_machine():
    process = subprocess.Popen(["tail", "-f", "/dev/null"], env={"A_NAME": "of ours"})
    try:
        found = Machine().processes("tail")
        assert found[process.pid] == {"A_NAME": "of ours"}
    finally:
        process.kill()
    os.waitid(
        os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
    )  # it has ended, and still is in the table of processes
    assert psutil.pid_exists(process.pid) and process.pid not in Machine().processes("tail")
    process.wait()


def test_a_real_ray_of_twelve(monkeypatch):
    """Its raylet still has the list that it was started with."""
    import ray

    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", TWELVE)
    ray.init(
        address="local",
        num_cpus=3,
        resources={"NPU": 12},
        include_dashboard=False,
        logging_level="ERROR",
    )
    try:
        monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES")
        monkeypatch.setattr(Machine, "importable", lambda self, name: False)
        seen = see_npus(Machine())
    finally:
        ray.shutdown()
    assert (seen.ray["resources"]["NPU"], seen.ray["resources"]["CPU"], seen.ray["nodes"]) == (
        12,
        3,
        1,
    )
    assert any(
        line.endswith(f"was started with ASCEND_RT_VISIBLE_DEVICES={TWELVE}") for line in seen.stale
    )


def test_acl_is_asked(tmp_path):
    """The emulation's acl in CANN's place."""
    environment = {**os.environ, **emulation.environment(16)}
    assert (
        Machine().run([sys.executable, "-c", CANN_PROBE], environment=environment).splitlines()[-1]
        == "devices 16"
    )
    (tmp_path / "acl.py").write_text(
        "class rt:\n    get_device_count = staticmethod(lambda: (0, 507033))\n"
    )
    with pytest.raises(ProbeError, match="gives error 507033") as failed:
        Machine().run(
            [sys.executable, "-c", CANN_PROBE],
            environment={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    check = _cann(Seen(cann=str(failed.value)), 16, None)
    assert (
        check.found.endswith("507033: a device cannot be started")
        and "~/ascend/log/debug/plog" in check.fix
    )
    # a container without the driver's libraries
    (tmp_path / "acl.py").write_text(
        "raise ImportError('libascend_hal.so: cannot open shared object file')\n"
    )
    with pytest.raises(ProbeError, match="libascend_hal.so: cannot open shared object") as failed:
        Machine().run(
            [sys.executable, "-c", CANN_PROBE],
            environment={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    assert "/usr/local/Ascend/driver" in _cann(Seen(cann=str(failed.value)), 16, None).fix


def test_a_command_that_hangs_is_cut(tmp_path):
    """With the process that it started and that keeps its output open."""
    program = f"sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(ProbeError, match="sh: no answer within 0.5 s"):
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
