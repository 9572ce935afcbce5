"""Played machines, and the files of a run that is ready."""

import copy
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_qerl.ascend.contract import DISTRIBUTIONS
from mindspeed_qerl.preflight import CHECKS, QUESTIONS, preflight
from mindspeed_qerl.preflight.case import FAILED, PASSED
from mindspeed_qerl.preflight.machine import LateError, ProbeError
from mindspeed_qerl.recipe.compose import compose
from tests.fake_box.npu_smi import table
from tests.fake_box.prepared import prepare

NAME = "grpo_qwen3_30b_a3b_gsm8k_16npu"
PACKAGES = DISTRIBUTIONS | {"torch_npu": "2.7.1.post1", "vllm": "0.11.0+empty"}
CANN, ATB = "/usr/local/Ascend/cann", "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1"
INSTALLED = f"{CANN}/x/ascend_toolkit_install.info"
DRIVER = "/usr/local/Ascend/driver/version.info"
FILES = {INSTALLED: "version=8.5.0", DRIVER: "Version=25.5.0"}
SHELL = {"ASCEND_HOME_PATH": CANN, "ATB_HOME_PATH": ATB}
ROOM = 10**12  # of a disk
GROUPS = tuple(CHECKS)


def npu_smi(count, health=None, used=None):
    return table("910C", range(count), health or {}, used or {})


@dataclass
class Box:
    """A machine in data: by default a healthy 910C box of 16 dies. Sizes in bytes."""

    smi: str | None = npu_smi(16)
    nodes: Sequence[int] = range(16)  # numbers of /dev/davinci*
    shut: tuple[str, ...] = ()  # device nodes that cannot be opened
    acl: int | None = 16
    ray: dict | None = None  # what a running cluster has
    ray_hangs: bool = False
    shell: dict[str, str] = field(default_factory=dict)  # beside SHELL
    environment: dict[str, str] = field(default_factory=lambda: dict(SHELL))
    there: tuple[str, ...] = ()  # more folders and files
    files: dict[str, str] = field(default_factory=dict)  # path -> content, beside FILES
    listening: tuple[str, ...] = ()  # HOST:PORT
    room: int = 1500 * 10**9
    shut_folders: tuple[str, ...] = ()  # that cannot be written
    free: int = 2 * 10**12  # of all other disks
    left: float = 0.4  # of the disk of /tmp
    taken: tuple[int, ...] = ()  # ports
    without: str = ""  # a command that is not installed
    imported: str = "imported in 31 s\n"  # what the imports of a worker say
    packages: dict[str, str | None] = field(default_factory=dict)  # other than PACKAGES

    def __post_init__(self):
        self.environment |= self.shell
        self.files = FILES | self.files
        self.asked = []  # commands, with their environment

    def run(self, command, timeout=20, environment=None):
        words = " ".join(command)
        self.asked.append((words, environment))
        if "ray.init" in words and self.ray_hangs:
            raise LateError(f"{command[0]}: no answer within {timeout:g} s")
        if "acl.rt.get_device_count" in words and self.acl is not None:
            assert "ASCEND_RT_VISIBLE_DEVICES" not in environment
            return f"warnings of CANN\nanswer {self.acl}\n"
        if "ray.init" in words and self.ray is not None:
            return f"answer {json.dumps(self.ray)}\n"
        if "importing" in words:
            return self.imported
        commands = dict.fromkeys(("ninja", "make", "g++", "python3", "python3-config"), "1.13.0")
        commands["npu-smi"] = self.smi
        output = commands.get(command[0])
        if output is None or command[0] == self.without:
            raise ProbeError(f"{command[0]} is not installed here")
        return output

    def glob(self, pattern):
        there = (CANN, INSTALLED, ATB, *(f"/dev/davinci{die}" for die in self.nodes), *self.there)
        return [path for path in there if fnmatch(path, pattern)]

    def read(self, path):
        if str(path) in self.files:
            return self.files[str(path)]
        return Path(path).read_text() if Path(path).is_file() else ""

    def version(self, distribution):
        return {**PACKAGES, **self.packages}.get(distribution)

    def disk(self, path):
        free = self.left * ROOM if path == "/tmp" else self.free
        return SimpleNamespace(total=ROOM, free=free)

    def user(self):
        return "root"

    def listens(self, address):
        return address in self.listening

    def interfaces(self):
        return {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1", "fe80::1"]}

    def writable(self, path):
        return str(path) not in self.shut_folders

    def opens(self, node):
        return node not in self.shut

    def may_execute(self, path):
        return True

    def memory(self):
        return self.room, "MemAvailable"

    def may_listen(self, host="", port=0):
        return port not in self.taken

    def runs(self, name):
        return self.ray is not None or self.ray_hangs


NO_NPU = dict(smi=None, nodes=(), acl=None, environment={})
EIGHT = dict(smi=npu_smi(8), nodes=range(8), acl=8)


def cluster(npus, cpus=320, nodes=1, free=None, jobs=()):
    return {
        "resources": {"NPU": float(npus), "CPU": float(cpus)},
        "nodes": nodes,
        "npus": [npus // nodes] * nodes,
        "jobs": list(jobs),
        "available": {"NPU": float(npus if free is None else free), "CPU": float(cpus)},
    }


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """Folder and resolved config of a run whose model, data and base weights are there."""
    folder = tmp_path_factory.mktemp("ready")
    files = prepare(NAME, folder, rows={"train": 80, "test": 10})
    with pytest.MonkeyPatch.context() as patch:
        for variable, place in files.items():
            patch.setenv(variable, place)
        return folder, compose(NAME, [f"run.root={folder / 'runs'}"])


@pytest.fixture
def ready(template):
    """The resolved config whose files are there; raw["..."] can be changed, files cannot."""
    return copy.deepcopy(template[1])


@pytest.fixture
def own(template, tmp_path):
    """The same with files of its own, which can be removed or replaced."""
    folder, raw = template
    shutil.copytree(folder, tmp_path / "own", copy_function=os.link)
    return json.loads(json.dumps(raw).replace(str(folder), str(tmp_path / "own")))


@pytest.fixture
def model(own):
    return Path(own["megatron_training"]["tokenizer_name_or_path"])


def rewrite(file, content):
    """Of `own`, whose files are links."""
    file.unlink()
    file.write_text(content)


def look(raw, box=None, own_ray=False):
    """name -> check; every fault has its way out, and nothing broke inside."""
    checks = preflight(raw, NAME, box or Box(), own_ray)
    assert not [check for check in checks if "could not be checked" in check.found]
    assert len({(check.group, check.name) for check in checks}) == len(checks)
    assert all(check.fix for check in checks if check.state == FAILED)
    dynamic = (
        "config",
        "versions",
        "environment",
    )  # keys, rules, repositories and interfaces have lines of their own
    names = [question.name for question in QUESTIONS]
    assert len(set(names)) == len(names)
    assert all(check.name in names or check.group in dynamic for check in checks)
    return {check.name: check for check in checks}


def said(checks, name, words, state=FAILED):
    """The check of that name, which has that state and says these words."""
    check = checks[name]
    assert check.state == state and words in check.found, check
    return check


def not_passed(checks):
    return {name: check.state for name, check in checks.items() if check.state != PASSED}
