"""A fake Ascend box: a command with mount, network, process and user namespaces of its own, in
which the devices, npu-smi, CANN, NNAL, the pinned packages and upstream's sources are played. Needs
no root; writes nothing outside of `folder`.

    result = run(Box(dies=16, lost=(3,)), ["bash", "examples/grpo/...", "--dry-run"], tmp_path)

In it /dev, /dev/shm, /tmp, /usr/local, runs/ of this checkout and the loopback interface are the
box's own; everything else is the host's. It ends with the command: what the command leaves running
is in `left_over`, and then killed.
"""

import functools
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mindspeed_qerl.ascend import contract
from mindspeed_qerl.ascend.contract import DISTRIBUTIONS
from tests import ROOT
from tests.fake_box.npu_smi import table

HERE = Path(__file__).parent
ASCEND = "/usr/local/Ascend"
UNSHARE = "unshare --user --map-root-user --mount --net --pid --fork --kill-child".split()
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
GB = 10**9


@dataclass(frozen=True)
class Box:
    """By default a healthy 910C box of 16 dies. Dies are numbered as /dev/davinci*."""

    dies: int = 16
    kind: str = "910C"  # 910C: two chips a card, with Phy-ID; 910B1 to 910B4 (A2): one, without
    mapped: int | None = None  # device nodes that the container has; None: all
    acl: int | None = None  # what acl counts; None: the device nodes
    acl_error: int = 0  # of acl.rt.get_device_count, such as 507033
    sick: Mapping[int, str] = field(
        default_factory=dict
    )  # die -> health word of npu-smi: Warning, Alarm, Critical
    smi_hangs: bool = False
    installed: bool = (
        True  # vllm-ascend, of the stand-in with its operators: else a checkout on PYTHONPATH
    )
    pybind11: bool = True  # for the python3 of PATH
    raises: Mapping[str, str] = field(
        default_factory=dict
    )  # module of a stand-in -> Python, run when it is imported
    upstream: str | None = (
        None  # folder of the five checkouts; None: stand-ins, which are the pins inside the box
    )
    memory: int = 1536 * GB  # of the host, and what is free of it
    free: int = 1400 * GB
    cgroup: Mapping[str, str] = field(
        default_factory=dict
    )  # file below /sys/fs/cgroup -> content; {}: the host's
    shm: str = "500G"
    disk: str = "8T"  # size of the disk below runs/
    files: Mapping[str, str] = field(default_factory=dict)  # path -> content, over files that exist
    without: tuple[str, ...] = ()  # commands of /usr/bin and /usr/sbin that are not installed
    network: bool = True  # of its own; False: the caller's
    address: str = ""  # one more of its loopback interface

    @property
    def nodes(self):
        """Numbers of /dev/davinci*."""
        return range(self.dies if self.mapped is None else self.mapped)


@functools.cache
def why_not():
    """Why there can be no fake box here; "" if there can."""
    if sys.platform != "linux" or not shutil.which("unshare"):
        return "a fake box needs Linux and unshare (util-linux)"
    done = subprocess.run(
        [*UNSHARE, "mount", "-t", "tmpfs", "none", "/tmp"],
        check=False,
        capture_output=True,
        text=True,
    )
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def start(box, command, folder, environment=None, sourced=False, within=(), **options):
    """Start `command` in a new box; `options` are Popen's. folder: for what the box is made of, on
    a path without colons.

    Args:
        environment: that of the command, given to it as `in_box` completes it; os.environ by
            default.
        sourced: CANN's and NNAL's environment is sourced before, and jemalloc preloaded, as a
            launcher does.
        within: words before the box's own command, as those of network.joined, for a box without a
            network.
    """
    plan = _make(box, folder)
    if sourced:
        script = f"source {ASCEND}/cann/set_env.sh; source {ASCEND}/nnal/atb/set_env.sh; "
        script += 'export LD_PRELOAD=$JEMALLOC; exec "$@"'
        command = ["bash", "-c", script, "bash", *command]
    (folder / "plan.json").write_text(json.dumps({**plan, "command": list(command)}))
    unshare = [word for word in UNSHARE if box.network or word != "--net"]
    options = {"cwd": ROOT, "start_new_session": True, "preexec_fn": _many_files, **options}
    return subprocess.Popen(
        [
            *within,
            *unshare,
            "--",
            sys.executable,
            "-I",
            "-S",
            str(HERE / "inside.py"),
            str(folder / "plan.json"),
        ],
        env=in_box(box, folder, os.environ if environment is None else environment),
        **options,
    )


def run(box, command, folder, environment=None, sourced=False, timeout=120, **options):
    """`start`, until it has ended."""
    process = start(
        box,
        command,
        folder,
        environment,
        sourced,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        **options,
    )
    try:
        output, complaint = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, output, complaint)


def left_over(folder):
    """The command lines of the processes that still ran in the box when its command ended."""
    return json.loads((folder / "left.json").read_text())


def in_box(box, folder, environment):
    """`environment`, with the box's packages and sources first on PYTHONPATH, its npu-smi and this
    Python on PATH.
    """
    paths = [
        str(folder / "site"),
        *map(str, _checkouts(box, folder)),
        environment.get("PYTHONPATH", ""),
    ]
    path = (
        f"/usr/local/bin:{Path(sys.executable).parent}:{environment.get('PATH', '/usr/bin:/bin')}"
    )
    return {
        "JEMALLOC": str(folder / "lib" / "libjemalloc.so.2"),
        **environment,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _many_files():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make(box, folder):
    """Write what the box is made of into `folder`, and what inside.py is to do with it."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("Ascend", "bin", "site", "lib", "binds"):
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir()
    _ascend(box, folder / "Ascend")
    distributions = dict(DISTRIBUTIONS)
    if box.installed:
        distributions["vllm_ascend"] = "0.11.0"
    for name, version in distributions.items():
        info = folder / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if name == "vllm_ascend":
            (info / "entry_points.txt").write_text(
                "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
            )
    scripts = dict.fromkeys(("make", "g++", "python3-config"), "#!/bin/sh\n")
    scripts["npu-smi"] = _npu_smi(box)
    for name, script in scripts.items():
        if name not in box.without:
            (folder / "bin" / name).write_text(script)
            (folder / "bin" / name).chmod(0o755)
    if box.pybind11:
        (folder / "site" / "pybind11").mkdir()
        (folder / "site" / "pybind11" / "__main__.py").touch()
    for place in ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64"):
        if (
            library := Path(place, "libutil.so.1")
        ).is_file():  # empty since glibc 2.34: what is preloaded must be one
            shutil.copy(library, folder / "lib" / "libjemalloc.so.2")
    hosts = f"127.0.0.1 localhost {socket.gethostname()}\n"
    files = {"/proc/meminfo": _meminfo(box), "/etc/hosts": hosts, **box.files}
    if box.upstream is None:
        _imported(box, folder)
        _stand_ins(folder, "vllm_ascend.vllm_ascend_C" not in box.raises)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        (folder / "upstream" / "vllm-ascend" / "vllm_ascend" / f"vllm_ascend_C{suffix}").touch()
    binds = {}
    for number, (path, content) in enumerate(files.items()):
        (folder / "binds" / str(number)).write_text(content)
        binds[path] = str(folder / "binds" / str(number))
    return {
        "devices": [f"davinci{die}" for die in box.nodes] + [*MANAGERS] * bool(box.nodes),
        "folder": str(folder),
        "binds": binds,
        "hidden": _of_this_python(),
        "runs": str(ROOT / "runs"),
        "left": str(folder / "left.json"),
        **{
            name: value
            for name, value in asdict(box).items()
            if name in ("shm", "disk", "cgroup", "without", "address")
        },
    }


def _meminfo(box):
    """The host's /proc/meminfo with the box's sizes, free and without swap."""
    sizes = {
        "MemTotal": box.memory,
        "MemFree": box.free,
        "MemAvailable": box.free,
        "SwapTotal": 0,
        "SwapFree": 0,
    }
    lines = Path("/proc/meminfo").read_text().splitlines()
    return "".join(
        f"{name}: {sizes[name] // 1024} kB\n"
        if (name := line.partition(":")[0]) in sizes
        else line + "\n"
        for line in lines
    )


def _npu_smi(box):
    if box.smi_hangs:
        return "#!/bin/sh\nexec sleep infinity\n"
    shown = table(box.kind, range(box.dies), box.sick, {})
    return f"#!/bin/sh\n[ \"$*\" = info ] || {{ echo 'Error parameter of -t'; exit 255; }}\ncat <<'EOF'\n{shown}EOF\n"


def _ascend(box, folder):
    """/usr/local/Ascend: the driver with its tools, CANN with its environment and acl, NNAL."""
    (folder / "driver").mkdir()
    (folder / "driver" / "version.info").write_text("Version=25.5.0\nascendhal_version=7.35.23\n")
    home = folder / "cann-8.5.0"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text(
        "package_name=Ascend-cann-toolkit\nversion=8.5.0\narch=x86_64\n"
    )
    acl = home / "python" / "site-packages" / "acl"
    acl.mkdir(parents=True)
    count = len(box.nodes) if box.acl is None else box.acl
    module = (HERE / "ascend" / "acl.py").read_text()
    (acl / "__init__.py").write_text(f"{module}COUNT, ERROR = {count}, {box.acl_error}\n")
    (home / "opp").mkdir()
    shutil.copy(HERE / "ascend" / "cann_set_env.sh", home / "set_env.sh")
    (folder / "cann").symlink_to(home.name)
    for abi in (0, 1):
        (folder / "nnal" / "atb" / "latest" / "atb" / f"cxx_abi_{abi}").mkdir(parents=True)
    shutil.copy(HERE / "ascend" / "atb_set_env.sh", folder / "nnal" / "atb" / "set_env.sh")


def _checkouts(box, folder):
    root = Path(box.upstream) if box.upstream else folder / "upstream"
    return [root / pin.title for pin in contract.PINS.values()]


def _of_this_python():
    """Folders of upstream's packages that this Python has beside the box's, as the local engine's
    megatron-core.
    """
    return [
        place
        for package in contract.PINS
        if (spec := importlib.util.find_spec(package))
        for place in spec.submodule_search_locations or []
        if "site-packages" in place
    ]


NO_HCCL = "libhccl.so: cannot open shared object file: No such file or directory"
# The packages of what a worker imports, besides upstream's and this Python's transformers;
# torch_npu cannot do without CANN's libraries.
STUBS = {
    "torch": "",
    "tensordict": "",
    "vllm": "",
    "torch_npu": "import importlib.util as it\nif not it.find_spec('acl'):\n    raise "
    f"ImportError({NO_HCCL!r})\n",
    "torch_npu.op_plugin": "",
    "torch_npu.op_plugin.atb": "",
    "torch_npu.op_plugin.atb._atb_ops": "def _register_atb_extensions(): pass\n",
    # as vLLM finds it
    "vllm.platforms": "from importlib.metadata import entry_points\nclass current_platform:\n"
    "    device_type = 'npu' * bool(entry_points(group='vllm.platform_plugins'))\n",
}
OF_UPSTREAM = {
    "mindspeed_rl.workers": "MindSpeed-RL",
    "mindspeed_rl.workers.integrated_worker": "MindSpeed-RL",
    "mindspeed_llm.training": "MindSpeed-LLM",
    "mindspeed_llm.training.arguments": "MindSpeed-LLM",
    "vllm_ascend.worker": "vllm-ascend",
    "vllm_ascend.worker.worker_v1": "vllm-ascend",
}


def _imported(box, folder):
    """Modules for the imports of a worker, with what `raises`."""
    shutil.rmtree(folder / "upstream", ignore_errors=True)
    for name, code in {**dict.fromkeys([*box.raises, *OF_UPSTREAM], ""), **STUBS}.items():
        place = folder / "upstream" / OF_UPSTREAM[name] if name in OF_UPSTREAM else folder / "site"
        module = place.joinpath(*name.split("."))
        module.mkdir(parents=True, exist_ok=True)
        (module / "__init__.py").write_text(f"{code}{box.raises.get(name, '')}\n")


def _stand_ins(folder, operators):
    """A package for each of upstream's repositories. operators: those of vllm-ascend can be
    imported, though their file is empty.
    """
    loaded = "import sys\nsys.modules['vllm_ascend.vllm_ascend_C'] = sys\n"
    for package, pin in contract.PINS.items():
        module = folder / "upstream" / pin.title / package
        (module / "core").mkdir(parents=True)
        code = loaded if operators and package == "vllm_ascend" else ""
        (module / "__init__.py").write_text(code)
