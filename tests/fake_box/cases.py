"""Broken boxes that the real tools/preflight.py is tried on (test_checks.py), as data."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_box import GB, ROOT, Box
from tests.fake_box.broken_files import (
    another_layout,
    config_says,
    cut,
    empty_labels,
    half,
    packed_test_split,
    pointers,
    same_split,
    tiny_base,
    without,
)

THIRTY, TWELVE, SEVEN = (
    "grpo_qwen3_30b_a3b_gsm8k_16npu",
    "grpo_qwen3_30b_a3b_gsm8k_12npu",
    "grpo_qwen25_7b_gsm8k_8npu",
)
ON_TWO = ("--nodes", "2", "--own-ray")
PAIR = "grpo_qwen3_30b_a3b_gsm8k_2x8npu"
HEALTHY = Box()
FAILED, WARNING, PASSED = "failed", "warning", "passed"
EIGHT = Box(dies=8, kind="910B3")


@dataclass(frozen=True)
class Case:
    """A broken box, and the line of the preflight that says so."""

    done: str  # what is done to it
    check: str
    state: str
    found: str  # words of what is found
    box: Box = HEALTHY
    config: str = THIRTY
    shell: Mapping[str, str] = field(default_factory=dict)
    before: str = ""  # a line of shell, in the box
    files: Callable[[Path, Path, Path], None] | None = None  # what is done to model, base and data
    options: tuple[str, ...] = ("--own-ray",)
    besides: tuple[str, ...] = ()  # checks that may say something too

    @property
    def alone(self):
        """Whether it changes the whole command or the whole box, so that no other case fits in."""
        whole = any(words in self.before for words in ("set --", "exec", "PYTHONPATH", "mount"))
        config_json = self.besides == OF_CONFIG_JSON
        return whole or config_json or self.config != THIRTY or self.check == "npu-smi"

    def changes(self):
        """What its box has otherwise than a healthy one."""
        values = vars(self.box).items()
        return {name: value for name, value in values if value != getattr(HEALTHY, name)}


def of_npus(*arguments, **more):
    """A case after which NPUs are missing, which `ranks` sums up."""
    besides = ("ranks", "Ray", "CANN", "npu-smi", "/dev/davinci*", "processes on the dies")
    return Case(*arguments, besides=besides, **more)


def exported(name, value, state, found, check="", besides=("variables",)):
    """A variable that the shell has; check: the one that says so, if it is not the variable's."""
    shell = {name: value}
    return Case(f"{name}={value}", check or name, state, found, shell=shell, besides=besides)


OF_CONFIG_JSON = ("config.json",)  # which transformers reads


def importing(done, module, error, **more):
    """A module that cannot be imported."""
    return Case(
        done,
        "imports of a worker",
        FAILED,
        error,
        box=Box(raises={module: f"raise ImportError({error!r})"}),
        **more,
    )


def of_operators(done, found, before):
    """What is done to the cache of operators, /tmp/c."""
    shell = {"TORCH_EXTENSIONS_DIR": "/tmp/c"}
    return Case(done, "MindSpeed's operators", FAILED, found, shell=shell, before=before)


def path_without(words):
    return f"export PYTHONPATH=$(tr : '\\n' <<< \"$PYTHONPATH\" | grep -v {words} | paste -s -d :)"


NPUS = [
    of_npus("one die has gone altogether", "npu-smi", FAILED, "15 dies", Box(lost=(3,))),
    of_npus(
        "the container has 12 of 16 device nodes",
        "/dev/davinci*",
        FAILED,
        "12 dies",
        Box(mapped=12),
    ),
    of_npus(
        "a sick die among the first twelve",
        "npu-smi",
        FAILED,
        "of the first 12, which the run uses, davinci3",
        Box(sick={3: "Alarm"}),
        TWELVE,
    ),
    Case(
        "a sick die that is not needed",
        "npu-smi",
        PASSED,
        "the first 12 that are mapped are healthy and free",
        Box(sick={13: "Critical"}),
        TWELVE,
    ),
    of_npus(
        "58 of 64 GB of a die are held",
        "npu-smi",
        FAILED,
        "The plan needs 44.8 GB of the 6.9 GB that are left",
        Box(used={5: 59000, 6: 3000}),
    ),
    Case(
        "a process of somebody else holds little of a die",
        "processes on the dies",
        WARNING,
        "davinci0: python3.11 (process 632268, 416 MB)",
        Box(used={0: 3416, 9: 3416}),
    ),
    Case(
        "dies of 32 GB",
        "memory of an NPU",
        FAILED,
        "the smallest die has 34.4 GB",
        Box(hbm=32768, dies=8, kind="910B4", used={}),
        SEVEN,
    ),
    of_npus("npu-smi hangs", "npu-smi", FAILED, "no answer within 20 s", Box(smi="hangs")),
    Case(
        "npu-smi prints an error of dcmi",
        "npu-smi",
        WARNING,
        "because the device is used. ret is -8020",
        Box(smi="dcmi model initialized failed, because the device is used. ret is -8020"),
    ),
    Case(
        "no npu-smi in the container",
        "npu-smi",
        WARNING,
        "npu-smi is not installed here",
        Box(smi="missing"),
    ),
    of_npus(
        "acl cannot start a device: 507033",
        "CANN",
        FAILED,
        "gives error 507033",
        Box(acl_error=507033),
    ),
    of_npus("acl counts 15 of 16 dies", "CANN", FAILED, "15 dies", Box(acl=15)),
    of_npus(
        "a device node that this user may not open",
        "/dev/davinci*",
        FAILED,
        "cannot open /dev/davinci5",
        before="touch /tmp/shut && chmod 0 /tmp/shut && mount --bind /tmp/shut /dev/davinci5; "
        'set -- setpriv --bounding-set=-dac_override,-dac_read_search "$@"',
    ),
    of_npus(
        "hisi_hdc is not mapped",
        "/dev/davinci*",
        FAILED,
        "16 dies, and cannot open /dev/hisi_hdc",
        before="umount /dev/hisi_hdc && rm /dev/hisi_hdc",
    ),
    of_npus(
        "ASCEND_RT_VISIBLE_DEVICES with twelve of 16",
        "ASCEND_RT_VISIBLE_DEVICES",
        FAILED,
        "12 entries",
        shell={"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(12)))},
    ),
    of_npus(
        "ASCEND_RT_VISIBLE_DEVICES with the last eight of 16",
        "ASCEND_RT_VISIBLE_DEVICES",
        FAILED,
        "a worker gives Ray's number straight to set_device",
        Box(kind="910B3"),
        SEVEN,
        {"ASCEND_RT_VISIBLE_DEVICES": ",".join(map(str, range(8, 16)))},
    ),
    of_npus(
        "ASCEND_RT_VISIBLE_DEVICES empty",
        "ASCEND_RT_VISIBLE_DEVICES",
        FAILED,
        "0 entries",
        shell={"ASCEND_RT_VISIBLE_DEVICES": ""},
    ),
    of_npus(
        "RAY_ADDRESS of a Ray that is gone",
        "Ray",
        FAILED,
        "RAY_ADDRESS=127.0.0.1:1 cannot be joined: nothing listens there",
        shell={"RAY_ADDRESS": "127.0.0.1:1"},
        options=(),
    ),
]
LISTENER = """exec python -c 'import os, socket, sys
listener = socket.create_server(("", {}))
listener.set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])' "$@" """
HOST = [
    Case(
        "a host with 23 GB free",
        "host memory",
        FAILED,
        "16 ranks load 107 GB of base weights at once",
        Box(memory=32 * GB, free=23 * GB),
    ),
    Case(
        "a container of 400 GB, of which others have filled 380",
        "host memory",
        FAILED,
        "20.0 GB are left",
        Box(cgroup={"memory.max": f"{400 * GB}", "memory.current": f"{380 * GB}"}),
    ),
    Case(
        "enough host memory for the weights, not for the processes",
        "host memory",
        WARNING,
        "130 GB are left (MemAvailable)",
        Box(free=130 * GB),
    ),
    Case("ulimit -n 1024", "open files", WARNING, "ulimit -n is 1,024", before="ulimit -n 1024"),
    Case(
        "a shell under taskset",
        "CPUs to run on",
        WARNING,
        "1, and vllm-ascend wants 5 for each rank",
        before='set -- taskset -c 0 "$@"',
    ),
    Case(
        "a user without a name in /etc/passwd",
        "user and folder",
        WARNING,
        "error code is 19",
        before='set -- unshare --user --map-user=4242 --map-group=4242 "$@"',
    ),
    Case(
        "a checkout that is mounted read-only",
        "user and folder",
        WARNING,
        "Failed to init tbe",
        before=f"mount --rbind {ROOT} {ROOT} && cd {ROOT} && mount -o remount,ro,bind {ROOT}",
        options=("--own-ray", "run.root=/tmp/runs"),
        besides=("disk for the run",),
    ),
    Case(
        "/dev/shm of 64 MB",
        "/dev/shm",
        WARNING,
        "Ray keeps its objects on the disk",
        Box(shm="64M"),
    ),
    Case(
        "the disk of /tmp is 96 % full",
        "/tmp",
        FAILED,
        "below 5 % Ray spills no object",
        before="mount -o remount,size=1M /tmp && head -c 1000K /dev/zero > /tmp/full",
    ),
    Case(
        "a disk with room for no checkpoint",
        "disk for the run",
        FAILED,
        "10.0 GB free",
        Box(disk="10000000000"),
    ),
    Case(
        "run.root is read-only",
        "run.root",
        FAILED,
        "cannot be written",
        before="mkdir /tmp/ro && mount -t tmpfs -o ro none /tmp/ro",
        options=("--own-ray", "run.root=/tmp/ro/runs"),
        besides=("disk for the run",),
    ),
    exported(
        "HCCL_IF_BASE_PORT", "65530", FAILED, "must be numbers from 1024 to 65535", "ports of HCCL"
    ),
    exported("HCCL_IF_BASE_PORT", "6370", FAILED, "6380 to 6381 are those of the", "ports of HCCL"),
    Case(
        "something listens on a port of HCCL",
        "ports of HCCL",
        FAILED,
        "12345 to 12360: 12347 taken",
        before=LISTENER.format(12347),
    ),
    Case(
        "the container has dies 8 to 15, and 12353 is taken",
        "ports of HCCL",
        FAILED,
        "12345 to 12360: 12353 taken",
        Box(lost=tuple(range(8)), kind="910B3"),
        SEVEN,
        before=LISTENER.format(12353),
    ),
    Case(
        "the kernel may draw HCCL's ports",
        "ports of HCCL",
        WARNING,
        "inside net.ipv4.ip_local_port_range",
        Box(files={"/proc/sys/net/ipv4/ip_local_port_range": "1024 65535\n"}),
    ),
    Case(
        "the host's name is another machine's address",
        "host name",
        WARNING,
        "the name of no address",
        Box(files={"/etc/hosts": f"127.0.0.1 localhost\n10.9.9.9 {os.uname().nodename}\n"}),
        besides=("GLOO_SOCKET_IFNAME",),
    ),
]
SOURCED = ("CANN's paths", "NNAL", "imports of a worker", "ranks", "Ray")
CANN = [
    Case(
        "CANN's set_env.sh was not sourced",
        "CANN's paths",
        FAILED,
        "set_env.sh was not sourced",
        before="unset ASCEND_HOME_PATH",
        besides=("CANN's version",),
    ),
    Case(
        "ASCEND_HOME_PATH=/nowhere",
        "CANN's paths",
        FAILED,
        "there is no such folder",
        before="export ASCEND_HOME_PATH=/nowhere",
        besides=("CANN's version",),
    ),
    Case(
        "PYTHONPATH without CANN's packages",
        "CANN",
        FAILED,
        "No module named 'acl'",
        before=path_without("Ascend"),
        besides=SOURCED,
    ),
    Case(
        "CANN 8.2.RC1",
        "CANN's version",
        FAILED,
        "MindSpeed at the pin is for 8.3.RC1",
        Box(cann="8.2.RC1"),
    ),
    Case(
        "CANN 9.0.0", "CANN's version", WARNING, "9.0.0; vllm-ascend was run for", Box(cann="9.0.0")
    ),
    Case(
        "no NNAL",
        "NNAL",
        FAILED,
        "ATB_HOME_PATH is not set",
        Box(nnal=False),
        besides=("NNAL's libraries",),
    ),
    Case(
        "NNAL sourced twice, for both C++ ABIs",
        "NNAL's libraries",
        WARNING,
        "cxx_abi_0 and cxx_abi_1",
        before="export LD_LIBRARY_PATH=/x/nnal/atb/cxx_abi_1/lib:$LD_LIBRARY_PATH",
    ),
    Case(
        "driver 24.1.0",
        "driver",
        FAILED,
        "24.1.0; MindSpeed-RL's guide names 25.5.0",
        Box(driver="24.1.0"),
    ),
    Case(
        "no make",
        "compilers",
        FAILED,
        "make is not installed here",
        Box(without=("make",)),
    ),
    Case(
        "no g++, and no pybind11 for python3",
        "compilers",
        FAILED,
        "g++ is not installed here; python3: exit 1",
        Box(pybind11=False, without=("g++",)),
    ),
    of_operators(
        "a build of operators was killed and left its lock",
        "left by a build that was killed",
        "mkdir -p /tmp/c/gmm && touch /tmp/c/gmm/lock",
    ),
    of_operators(
        "the cache of operators is mounted noexec",
        "is mounted noexec",
        "mkdir /tmp/c && mount -t tmpfs -o noexec none /tmp/c",
    ),
    of_operators(
        "the cache of operators is read-only",
        "cannot be written",
        "mkdir /tmp/c && mount -t tmpfs -o ro none /tmp/c",
    ),
]
SHELL = [
    exported("VLLM_ASCEND_ENABLE_NZ", "1", FAILED, "upstream trains with 0"),
    exported("VLLM_USE_V1", "0", FAILED, "written for vLLM's V1 engine"),
    exported("VLLM_VERSION", "0.9.2", FAILED, "the code for another vLLM"),
    exported(
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
        "",
        FAILED,
        "Ray would hide all but one die",
    ),
    exported(
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments:True,max_split_size_mb:256",
        FAILED,
        "does not take them together",
    ),
    exported(
        "PYTORCH_NPU_ALLOC_CONF",
        "max_split_size_mb:256, expandable_segments: True",
        FAILED,
        "does not take them together",
    ),
    exported(
        "HCCL_CONNECT_TIMEOUT",
        "120",
        WARNING,
        "HCCL_CONNECT_TIMEOUT is '120', the engine would set '1800'",
        "variables",
        besides=(),
    ),
    exported("ASCEND_LAUNCH_BLOCKING", "1", WARNING, "every kernel is waited for"),
    exported(
        "HCCL_SOCKET_IFNAME",
        "eth7",
        FAILED,
        "no network interface of this machine is that; here are lo",
    ),
    exported("GLOO_SOCKET_IFNAME", "eth7", FAILED, "no network interface of this machine is that"),
    exported("HCCL_IF_IP", "10.9.9.9", FAILED, "no network interface of this machine has it"),
    exported("RANK_TABLE_FILE", "/nowhere/ranks.json", FAILED, "ranks and addresses from it"),
    exported("HCCL_OP_EXPANSION_MODE", "AIV", FAILED, "the dispatch of experts waits for"),
    exported("OMP_PROC_BIND", "true", FAILED, "to one core"),
    exported("VLLM_PLUGINS", "lora_filesystem_resolver", FAILED, "Failed to infer device type"),
    exported(
        "HCCL_HOST_SOCKET_PORT_RANGE",
        "60000-60050",
        WARNING,
        "not from HCCL_IF_BASE_PORT on",
        besides=("variables", "ports of HCCL"),
    ),
    exported("HCCL_NPU_SOCKET_PORT_RANGE", "61000-61050", WARNING, "of a guide for several nodes"),
    exported("HCCL_INTRA_ROCE_ENABLE", "1", WARNING, "leaves HCCS for the NPUs' network ports"),
    exported("HCCL_INTRA_PCIE_ENABLE", "1", WARNING, "leaves HCCS for PCIe"),
    exported("HCCL_INTER_HCCS_DISABLE", "TRUE", WARNING, "leaves HCCS"),
    exported("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", WARNING, "torch has no torch.npu"),
    exported("RAY_grpc_enable_http_proxy", "1", WARNING, "through http_proxy"),
    Case(
        "tuning variables of a recipe",
        "variables",
        PASSED,
        "VLLM_ASCEND_ENABLE_PREFETCH_MLP, VLLM_USE_MODELSCOPE",
        shell={"VLLM_ASCEND_ENABLE_PREFETCH_MLP": "1", "VLLM_USE_MODELSCOPE": "True"},
    ),
]
OTHER_PLATFORM = (
    "class UnspecifiedPlatform: device_type = ''\ncurrent_platform = UnspecifiedPlatform()"
)
VERSIONS = [
    Case(
        "torch 2.5.1",
        "torch",
        FAILED,
        "2.5.1 is installed, the pin is 2.7.1",
        Box(packages={"torch": "2.5.1"}),
    ),
    Case("no torch_npu", "torch_npu", FAILED, "not installed", Box(packages={"torch_npu": None})),
    Case("vLLM 0.10.2", "vllm", FAILED, "0.10.2 is installed", Box(packages={"vllm": "0.10.2"})),
    Case("numpy 2", "numpy", FAILED, "error code is 500001", Box(packages={"numpy": "2.2.6"})),
    Case(
        "triton beside vLLM",
        "triton",
        WARNING,
        "0 active drivers",
        Box(packages={"triton": "3.4.0"}),
    ),
    Case(
        "triton-ascend",
        "triton-ascend",
        WARNING,
        "MindSpeed-RL does not go with it",
        Box(packages={"triton-ascend": "3.2.0"}),
    ),
    Case(
        "transformer-engine",
        "transformer-engine",
        WARNING,
        "without CUDA's libraries",
        Box(packages={"transformer-engine": "2.2"}),
    ),
    Case(
        "vllm-ascend as a checkout, not installed",
        "imports of a worker",
        FAILED,
        "Failed to infer device type",
        Box(installed=False),
    ),
    Case(
        "another MindSpeed first on PYTHONPATH",
        "MindSpeed",
        WARNING,
        "is another version (sha256:",
        before="mkdir -p /tmp/other/mindspeed && echo 'VERSION = 2.2' > "
        "/tmp/other/mindspeed/__init__.py && export PYTHONPATH=/tmp/other:$PYTHONPATH",
    ),
    Case(
        "upstream's sources are not on PYTHONPATH",
        "upstream's sources",
        FAILED,
        "cannot be imported here",
        before=path_without("/MindSpeed"),
        besides=("imports of a worker",),
    ),
    importing(
        "the driver's libraries are not on LD_LIBRARY_PATH",
        "torch_npu",
        "libascend_hal.so: cannot open shared object file: No such file or directory",
    ),
    importing(
        "CANN 9 below torch_npu 2.7.1",
        "torch_npu",
        "libtorch_npu.so: undefined symbol: MsprofSysCycleTime",
    ),
    importing(
        "scikit-learn's libgomp on aarch64",
        "transformers",
        "libgomp-d22c30c5.so.1.0.0: cannot allocate memory in static TLS block",
        besides=OF_CONFIG_JSON,
    ),
    importing(
        "vllm-ascend built on another image",
        "vllm_ascend.worker.worker_v1",
        "libc.so.6: version `GLIBC_2.38' not found",
    ),
    Case(
        "vLLM takes another platform",
        "imports of a worker",
        FAILED,
        "vLLM took UnspecifiedPlatform",
        Box(raises={"vllm.platforms": OTHER_PLATFORM}),
    ),
    Case(
        "an import crashes",
        "imports of a worker",
        FAILED,
        "exit -11: importing transformers",
        Box(raises={"transformers": "import os; os.kill(os.getpid(), 11)"}),
        besides=OF_CONFIG_JSON,
    ),
    Case(
        "an import hangs",
        "imports of a worker",
        FAILED,
        "no answer within 120 s: importing tensordict",
        Box(raises={"tensordict": "import time; time.sleep(1e6)"}),
    ),
    Case(
        "vllm-ascend's compiled operators are cut short",
        "imports of a worker",
        WARNING,
        "file too short",
        Box(raises={"vllm_ascend.vllm_ascend_C": ""}),
    ),
]
FILES = [
    Case(
        "config.json with YaRN",
        "config.json",
        FAILED,
        "rope_type is 'yarn'; only 'default' is built",
        files=config_says(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        ),
    ),
    Case(
        "config.json with tied embeddings",
        "config.json",
        FAILED,
        "untie_embeddings_and_output_weights = True in the config",
        files=config_says(tie_word_embeddings=True),
        besides=("weights", "host memory"),
    ),
    Case(
        "config.json with another rope_theta",
        "config.json",
        FAILED,
        "rotary_base",
        files=config_says(rope_theta=10000000.0),
    ),
    Case(
        "config.json with fewer positions than a prompt and its answer",
        "config.json",
        FAILED,
        "max_position_embeddings = 2048",
        files=config_says(max_position_embeddings=2048),
    ),
    Case(
        "no model", "config.json", FAILED, "has no config.json", files=without("model/config.json")
    ),
    Case(
        "half of the model was downloaded",
        "weights",
        WARNING,
        "30.0 GB, and the model of config.json has 61.1 GB",
        files=half,
    ),
    Case(
        "the base weights are pointers of git-lfs",
        "base weights",
        FAILED,
        "a pointer of git-lfs",
        files=pointers("base"),
    ),
    Case(
        "the tokenizer is a pointer of git-lfs",
        "tokenizer",
        FAILED,
        "a pointer of git-lfs",
        files=pointers("tokenizer"),
    ),
    Case(
        "no chat template",
        "tokenizer",
        WARNING,
        "no chat template",
        files=without("model/tokenizer_config.json"),
    ),
    Case(
        "base weights of a few bytes", "base weights", FAILED, "another model's?", files=tiny_base
    ),
    Case(
        "base weights of another layout",
        "base weights",
        FAILED,
        "TP 1 PP 1 EP 16 needs 16 files",
        files=another_layout,
    ),
    Case("one file of the base weights is cut", "base weights", FAILED, "is not whole", files=cut),
    Case(
        "the base weights are not converted",
        "base weights",
        FAILED,
        "not converted yet",
        files=without("base/latest_checkpointed_iteration.txt"),
        besides=("disk for the base",),
    ),
    Case(
        "no base weights, and no room for them",
        "disk for the base",
        FAILED,
        "about 107 GB needed",
        files=without("base/latest_checkpointed_iteration.txt"),
        before="mkdir /tmp/few && mount -t tmpfs -o size=1G none /tmp/few",
        options=("--own-ray", "actor_config.load=/tmp/few/Qwen3-30B-A3B-tp1-pp1-ep16"),
        besides=("base weights",),
    ),
    Case(
        "no training data",
        "training files",
        FAILED,
        "gsm8k_train_packed_input_ids_document",
        files=without("packed"),
        besides=("train and test",),
    ),
    Case(
        "empty labels in the training data",
        "training files",
        FAILED,
        "are empty: nothing to verify against",
        files=empty_labels,
    ),
    Case(
        "no test data",
        "test rows",
        FAILED,
        "test_chat.parquet",
        files=without("data/test_chat.parquet"),
        besides=("keys and values",),
    ),
    Case(
        "the test split in place of the training file",
        "train and test",
        FAILED,
        "1,319 of 1,319 test questions are training questions too",
        files=same_split,
    ),
    Case(
        "packed prompts of the test split",
        "train and test",
        FAILED,
        "1,319 packed prompts, 7,473 training rows, 1,319 test rows: they are not",
        files=packed_test_split,
    ),
    Case(
        "a layout that cannot exist",
        "experts by training ranks",
        FAILED,
        "128 experts cannot be divided by TP 1 x EP 5",
        options=("--own-ray", "actor_config.expert_model_parallel_size=5"),
        besides=(
            "ranks fill expert groups",
            "infer groups hold whole training groups",
            "base weights",
        ),
    ),
]
PREFLIGHT = [*NPUS, *HOST, *CANN, *SHELL, *VERSIONS, *FILES]
