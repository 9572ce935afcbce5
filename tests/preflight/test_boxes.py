"""Played boxes: each fault is found where it is, and nowhere else, with what to type."""

import re
import sysconfig

import pytest

from mindspeed_qerl.preflight import FAILED, GROUPS, PASSED, SKIPPED, WARNING
from mindspeed_qerl.recipe.compose import compose
from tests.preflight.conftest import (
    ATB,
    CANN,
    EIGHT,
    JEMALLOC,
    NAME,
    NO_NPU,
    PROCESS,
    RAYLET,
    Box,
    cluster,
    look,
    not_passed,
    npu_smi,
)

TWELVE, SIXTEEN = (",".join(map(str, range(count))) for count in (12, 16))
LIST = "ASCEND_RT_VISIBLE_DEVICES"
LOST = {"ranks": FAILED}
DATASETS = "/upstream/Megatron-LM/megatron/core/datasets"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
COMPILER = {"g++": "13", "python3": "-I/pip", "python3-config": ".so"}


def compiling(target: str = f"helpers_cpp{SUFFIX}", without: str = "", **more) -> dict:
    commands = {"make": f"make: Entering\ng++ -O3 -shared helpers.cpp -o {target}\n", **COMPILER}
    return {"commands": commands, "without": without, "there": (f"{DATASETS}/Makefile",), **more}


# What is changed of a healthy box, the check that says so, its state, words, words of its fix, and
# the states of others.
CASES = [
    # NPUs
    (
        {"shell": {LIST: TWELVE}},
        LIST,
        FAILED,
        "12 entries",
        f"unset {LIST}",
        LOST | {"Ray": WARNING},
    ),
    (
        dict(smi=None, davinci=12, acl=12),
        "/dev/davinci*",
        FAILED,
        "12 device nodes: the container maps fewer",
        "--device=/dev/davinci",
        LOST | {"npu-smi": WARNING, "CANN": WARNING, "Ray": WARNING, "driver": SKIPPED},
    ),
    (
        dict(davinci=12, acl=12),
        "/dev/davinci*",
        FAILED,
        "12 device nodes",
        "",
        LOST | {"CANN": WARNING, "Ray": WARNING},
    ),
    (
        dict(shut={"/dev/hisi_hdc": "is not there"}),
        "/dev/davinci*",
        FAILED,
        "16 device nodes, and /dev/hisi_hdc is not there",
        "--device=/dev/hisi_hdc",
        LOST,
    ),
    (
        dict(shut={f"/dev/davinci{i}": "is shut" for i in range(6)}),
        "/dev/davinci*",
        FAILED,
        "/dev/davinci3 is shut and 2 more",
        "--cap-add DAC_OVERRIDE",
        LOST,
    ),
    (dict(acl=15), "CANN", FAILED, "15 of the 16 devices", "fewer NPUs", LOST | {"Ray": WARNING}),
    (
        dict(smi=npu_smi(16, health={7: "Critical"})),
        "npu-smi",
        FAILED,
        "NPU 3 chip 1: Critical; the run would use davinci7",
        "vendor",
        LOST,
    ),
    (dict(smi=npu_smi(15)), "npu-smi", FAILED, "15 dies", "vendor", LOST),
    (
        dict(smi=npu_smi(16, used={5: 40000})),
        "npu-smi",
        FAILED,
        "NPU 2 chip 1 (40,000 of 65,536 MB). The plan needs 26.9 GB of the 26.8 GB",
        "npu-smi info",
        LOST,
    ),
    (
        dict(smi=npu_smi(16, used={5: 31877})),  # fits, but for the KV cache
        "npu-smi",
        FAILED,
        "KV cache would be left",
        "npu-smi info",
        LOST,
    ),
    (dict(smi=npu_smi(16, used={5: 12000})), "npu-smi", WARNING, "12,000 of", "npu-smi info", {}),
    *(
        (dict(smi=npu_smi(16, health=dict(enumerate(words)))), "npu-smi", state, found, "", more)
        for words, state, found, more in (
            (["ok"] * 8 + ["正常"] * 8, PASSED, "16 dies; the first 16", {}),
            (["Warning"] * 16, WARNING, "chip 0: Warning", {}),
            (["OK"] * 15 + ["Gut"], WARNING, "NPU 7 chip 1: Gut: a minor alarm, or an unknown", {}),
            (["异常"] + ["OK"] * 15, FAILED, "16 dies, not healthy: NPU 0 chip 0: 异常", LOST),
        )
    ),
    (
        dict(smi=npu_smi(16).replace("Memory-Usage(MB)  HBM-Usage(MB)", "")),
        "npu-smi",
        WARNING,
        "it prints no memory, or no processes",
        "npu-smi info",
        {},
    ),
    (dict(smi=npu_smi(16).replace("Process id", "PID")), "npu-smi", WARNING, "prints no", "", {}),
    (dict(hangs=("npu-smi",)), "npu-smi", FAILED, "no answer", "dmesg", LOST | {"driver": SKIPPED}),
    (
        dict(smi="+----+\n| 16 NPUs, all well |\n+----+"),
        "npu-smi",
        WARNING,
        "in an unknown form: +----+ | 16 NPUs, all well |",
        "On the host",
        {"driver": SKIPPED},
    ),
    (
        dict(
            smi=npu_smi(16) + PROCESS + PROCESS.replace("632268", "NA    ").replace("| 0 ", "| 3 ")
        ),
        "processes on the dies",
        WARNING,
        (
            "davinci1: python3.1 (process 632268, 197 MB); davinci7: python3.1 (process NA, 197 MB). "
            "If"
        ),
        "--privileged",
        {},
    ),
    *(
        ({"shell": {LIST: given}}, LIST, state, found, fix, LOST if state == FAILED else {})
        for given, state, found, fix in (
            (SIXTEEN, PASSED, "16 entries", ""),
            (f"{SIXTEEN},15", FAILED, "'15', '15' must be numbers, each once", f"export {LIST}="),
            (f"{SIXTEEN},", FAILED, "'' must be numbers", ""),
            (f"{SIXTEEN}, 16", FAILED, "' 16' must be numbers", ""),
            (f"{SIXTEEN},99", WARNING, "there are 16 dies, from 0 on", ""),
            (f"1,0,{SIXTEEN[4:]}", FAILED, "straight to set_device", f"export {LIST}={SIXTEEN}"),
        )
    ),
    (
        {"shell": {LIST: "0-15"}},
        LIST,
        FAILED,
        "1 entries: 0-15",
        "unset",
        LOST | {"Ray": WARNING},
    ),
    # Ray
    (dict(ray=cluster(16), raylets=RAYLET), "Ray", PASSED, "one is running with 16 NPUs", "", {}),
    (
        dict(ray=cluster(12), raylets={4242: {LIST: TWELVE}}),
        "Ray",
        FAILED,
        f"process 4242) was started with {LIST}={TWELVE}",
        "ray stop",
        LOST,
    ),
    (dict(ray=cluster(12), raylets=RAYLET), "Ray", FAILED, "other --resources", "ray stop", LOST),
    (
        dict(ray=cluster(16, free=4, jobs=("process 7 (python x.py)",)), raylets=RAYLET),
        "Ray",
        FAILED,
        "of which 4 are free; the others are held by process 7 (python x.py): upstream would wait",
        "fewer NPUs",
        LOST,
    ),
    (
        dict(hangs=("ray.init",), raylets=RAYLET),
        "Ray",
        FAILED,
        "no answer within 20 s",
        "ray stop",
        LOST | {"CPUs": SKIPPED},
    ),
    # the host
    (dict(logical_cpus=76), "CPUs", PASSED, "reserve 76 logical CPUs; there are 76", "", {}),
    (
        dict(logical_cpus=75),
        "CPUs",
        FAILED,
        "reserve 76 logical CPUs; there are 75",
        "--num-cpus",
        {},
    ),
    # what Ray has counts, not the machine
    (dict(ray=cluster(16, cpus=64), raylets=RAYLET), "CPUs", FAILED, "there are 64", "--num", {}),
    (dict(logical_cpus=8, ray=cluster(16, cpus=76), raylets=RAYLET), "CPUs", PASSED, "", "", {}),
    (dict(disk=10**9), "disk for the run", FAILED, "1.0 GB free", "run.root=DIR", {}),
    (dict(disk=10**11), "disk for the run", WARNING, "100 GB free", "run.root=DIR", {}),
    (dict(shm=64 * 2**20), "/dev/shm", WARNING, "67,108,864 bytes free", "--shm-size", {}),
    (dict(limit=1024), "open files", WARNING, "ulimit -n is 1,024", "ulimit -n 32768", {}),
    (
        dict(files={"/proc/sys/vm/panic_on_oom": "1\n"}),
        "vm.panic_on_oom",
        WARNING,
        "the whole machine reboots",
        "sysctl -w",
        {},
    ),
    (dict(taken=(12350,)), "ports of HCCL", FAILED, "12345 to 12360: 12350 taken", "ss -ltnp", {}),
    (dict(taken=(12370,)), "ports of HCCL", PASSED, "are free", "", {}),
    # by the numbers of the dies
    (
        dict(smi=None, nodes=tuple(range(16, 32)), taken=(12370,)),
        "ports of HCCL",
        FAILED,
        "12345 to 12376: 12370 taken",
        "",
        {"npu-smi": WARNING, "driver": SKIPPED},
    ),
    (
        {"shell": {"HCCL_IF_BASE_PORT": "65521"}},
        "ports of HCCL",
        FAILED,
        "must be a whole number from 1024 to 65520",
        "unset HCCL_IF_BASE_PORT",
        {"variables": WARNING},
    ),
    *(
        (
            {
                "files": {
                    f"/proc/sys/net/ipv4/ip_local_{name}": text for name, text in spans.items()
                }
            },
            "ports of HCCL",
            state,
            "",
            "",
            {},
        )
        for spans, state in (
            ({"port_range": "1024\t65535\n", "reserved_ports": "\n"}, WARNING),
            ({"port_range": "1024\t65535\n", "reserved_ports": "8080,12345-12360\n"}, PASSED),
            ({"port_range": "1024\t65535\n", "reserved_ports": "12345-12359\n"}, WARNING),
            ({"port_range": "32768\t60999\n"}, PASSED),
        )
    ),
    (dict(left=0.049), "/tmp", FAILED, "4.9% of its disk are free; below 5 % Ray", "du -xh", {}),
    (dict(left=0.06), "/tmp", WARNING, "6.0% of its disk are free", "du -xh", {}),
    ({"shell": {"LD_PRELOAD": ""}}, "jemalloc", WARNING, "not in LD_PRELOAD", "libjemalloc2", {}),
    (
        {"shell": {"LD_PRELOAD": "/nowhere/libjemalloc.so"}},
        "jemalloc",
        WARNING,
        "not there",
        "",
        {},
    ),
    # CANN and compilers
    (
        {"environment": {"ATB_HOME_PATH": ATB, "LD_PRELOAD": JEMALLOC}},
        "CANN's paths",
        FAILED,
        "set_env.sh was not sourced",
        "source /usr/local/Ascend",
        {},
    ),
    (
        dict(cann="8.2.RC1"),
        "CANN's version",
        FAILED,
        "8.2.RC1; MindSpeed at the pin is for 8.3.RC1",
        "CANN 8.5.0",
        {},
    ),
    (dict(cann="8.4.0"), "CANN's version", WARNING, "run for 8.5.0 and 8.3.RC1", "CANN 8.5.0", {}),
    (dict(cann=None), "CANN's version", WARNING, "in no ascend_*_install.info", "CANN 8.5.0", {}),
    (
        {
            "shell": {
                "LD_LIBRARY_PATH": f"{ATB}/lib:{CANN}/lib64:{ATB.replace('abi_1', 'abi_0')}/lib"
            }
        },
        "NNAL's libraries",
        WARNING,
        "LD_LIBRARY_PATH has cxx_abi_0 and cxx_abi_1: ",
        "nnal/atb/set_env.sh",
        {},
    ),
    (
        {"shell": {"LD_LIBRARY_PATH": f"{ATB}/lib:{ATB}/examples"}},
        "NNAL's libraries",
        None,
        "",
        "",
        {},
    ),
    (compiling(), "Megatron's helpers", PASSED, "", "", {}),
    (
        compiling(commands={"make": "make: Nothing to be done"}),
        "Megatron's helpers",
        PASSED,
        "",
        "",
        {},
    ),
    *(
        (compiling(**change), "Megatron's helpers", FAILED, found, "pip install pybind11", {})
        for change, found in (
            ({"without": "make"}, "make is not installed here: rank 0 compiles"),
            ({"without": "g++"}, "g++ is not installed here: rank 0"),
            ({"without": "python3"}, "python3 is not installed here"),
            ({"target": "helpers_cpp"}, f"another Python's: it is not for helpers_cpp{SUFFIX}"),
        )
    ),
    (
        compiling("helpers_cpp", there=(f"{DATASETS}/Makefile", f"{DATASETS}/helpers_cpp{SUFFIX}")),
        "Megatron's helpers",
        PASSED,
        "",
        "",
        {},
    ),
    *(
        (
            {"shell": {"HOME": "/u", **shell}, **change},
            "MindSpeed's operators",
            state,
            found,
            "",
            {},
        )
        for shell, change, state, found in (
            ({}, {"without": "ninja"}, FAILED, "ninja is not installed here: torch compiles"),
            (
                {},
                {"there": ("/u/.cache/torch_extensions/py311_cpu/gmm/lock",)},
                FAILED,
                "py311_cpu/gmm/lock: every worker waits for it, for ever; left by a build that was",
            ),
            # of another Python; in the default folder, where another is given
            ({}, {"there": ("/u/.cache/torch_extensions/py38_cpu/gmm/lock",)}, PASSED, ""),
            (
                {"TORCH_EXTENSIONS_DIR": "/fast"},
                {"there": ("/u/.cache/torch_extensions/py311_cpu/gmm/lock",)},
                PASSED,
                "/fast",
            ),
            (
                {"TORCH_EXTENSIONS_DIR": "/fast"},
                {"there": ("/fast/gmm/lock",), "compiling": {7: {}}},
                WARNING,
                "/fast/gmm/lock: every worker waits for it, for ever; somebody compiles now",
            ),
            ({"TORCH_EXTENSIONS_DIR": "/fast"}, {"executable": False}, FAILED, "mounted noexec"),
            ({"TORCH_EXTENSIONS_DIR": "/x"}, {"shut_folders": ("/x",)}, FAILED, "be written"),
        )
    ),
    # versions
    *(
        ({"packages": {name: version}}, name, state, found, fix, {})
        for name, version, state, found, fix in (
            ("vllm", "0.11.1", FAILED, "0.11.1 is installed, the pin is 0.11.0", "vllm==0.11.0"),
            ("vllm", "0.11.0rc2", FAILED, "0.11.0rc2 is installed", "docs/ascend.md"),
            ("torch", "2.7.10", FAILED, "2.7.10 is installed", "docs/ascend.md"),
            ("ray", "2.42.1", WARNING, "2.42.1 is installed", "pip install ray==2.54.0"),
            ("peft", None, FAILED, "not installed; the pin is 0.7.1", "pip install peft==0.7.1"),
            ("numpy", "1.26.0", WARNING, "1.26.0 is installed", "numpy==1.26.4"),
        )
    ),
    (
        dict(plugins=("lora",)),
        "vLLM's platform",
        FAILED,
        "/upstream/vllm-ascend is not",
        "setup.py",
        {},
    ),
    (
        dict(folders=(CANN, ATB)),
        "vllm-ascend's operators",
        WARNING,
        "no vllm_ascend_C*.so",
        "setup",
        {},
    ),
    *(
        ({"imported": f"cannot import {said}\n"}, "imports of a worker", state, said, fix, {})
        for said, state, fix in (
            ("vllm: ImportError: libascend_hal.so: no", FAILED, "/usr/local/Ascend/driver"),
            ("vllm_ascend_C: ImportError: file too short", WARNING, "docs/ascend.md"),
        )
    ),
    # the shell
    *(
        ({"shell": {name: value}}, name, state, found, f"unset {name}", more)
        for name, value, state, found, more in (
            ("VLLM_ASCEND_ENABLE_NZ", "1", FAILED, "'1' in the shell: upstream trains with 0", 1),
            ("VLLM_DP_SIZE", "8", WARNING, "is not used", 0),
            ("HCCL_BUFFSIZE", "8", WARNING, "is not used", 0),
            ("VLLM_PLUGINS", "lora,ascending", FAILED, "Failed to infer device type", 0),
            ("HCCL_IF_IP", "10.0.0.2", FAILED, "no network interface of this machine has it", 0),
        )
        for more in [{"variables": WARNING} if more else {}]
    ),
    (
        {"shell": {"HCCL_CONNECT_TIMEOUT": "120"}},
        "variables",
        WARNING,
        "HCCL_CONNECT_TIMEOUT is '120', the engine would set '1800'",
        "unset NAME",
        {},
    ),
    *(
        ({"shell": {"HCCL_IF_IP": address}}, "HCCL_IF_IP", None, "", "", {})
        for address in ("FE80::1", "fe80::1%eth0", "10.0.0.1")
    ),
    # harmless
    (
        {
            "shell": {
                "ASCEND_OPP_PATH": f"{CANN}/opp",
                "VLLM_USE_V1": "1",
                "ASCEND_LAUNCH_BLOCKING": "0",
                "VLLM_ASCEND_ENABLE_FLASHCOMM": "1",
                "OMP_PROC_BIND": "false",
                "HCCL_OP_EXPANSION_MODE": "AI_CPU",
                "VLLM_PLUGINS": "ascend,ascend_enhanced_model",
                "ATB_LLM_COMM_BACKEND": "lccl",
            }
        },
        "other variables",
        PASSED,
        (
            "ASCEND_LAUNCH_BLOCKING, ATB_LLM_COMM_BACKEND, HCCL_OP_EXPANSION_MODE, OMP_PROC_BIND, "
            "VLLM_"
        ),
        "",
        {},
    ),
]


@pytest.mark.parametrize(("change", "name", "state", "found", "fix", "more"), CASES)
def test_a_box(ready, change, name, state, found, fix, more):
    checks = look(ready, Box(**change))
    expected = {**more, name: state} if state not in (PASSED, None) else more
    assert not_passed(checks) == expected
    if state is None:
        assert name not in checks
    else:
        assert checks[name].state == state
        assert found in checks[name].found and fix in checks[name].fix


def test_a_box_that_is_ready(ready):
    checks = look(ready, Box())
    assert not_passed(checks) == {}
    assert not any(check.fix for check in checks.values())
    assert checks["ranks"].found == "16 asked for here; npu-smi 16, /dev/davinci* 16, CANN 16"
    assert checks["Ray"].found == "none is running; one that is started now counts 16"
    assert "TP 1 PP 1 EP 16 DP 16" in checks["layout"].found
    assert "16 of 16 files for TP 1 PP 1 EP 16" in checks["base weights"].found
    assert tuple(dict.fromkeys(check.group for check in checks.values())) == GROUPS


def test_where_npus_are_lost(ready):
    box = Box(shell={LIST: TWELVE})
    assert look(ready, box)["ranks"].found == (
        f"16 asked for here; npu-smi 16, /dev/davinci* 16, CANN 16, {LIST} 12. Lost at {LIST}"
    )


def test_the_dies_that_a_run_takes(ready):
    """The first that are mapped: others may be sick, or used by others; Ray's number goes to
    set_device.
    """
    ready["rl_config"]["actor_resource"]["num_npus"] = 12
    sick = npu_smi(16, health={13: "Critical"}, used={14: 60000})
    assert look(ready, Box(smi=sick))["npu-smi"].state == PASSED
    box = Box(shell={LIST: ",".join(map(str, range(4, 16)))})
    assert look(ready, box)[LIST].fix == f"export {LIST}={TWELVE}"
    assert look(ready, Box(shell={LIST: TWELVE}))[LIST].state == PASSED
    other = Box(smi=npu_smi(16) + PROCESS.replace("| 0 ", "| 7 "))
    assert "processes on the dies" not in look(ready, other)


def test_dies_that_the_container_has_under_other_names(ready):
    """16 nodes named 0 to 15, and Phy-IDs of 16 to 31: all are used."""
    table = re.sub(
        r"(?m)^\| ([01])     (\d+)( +\| 0000)",
        lambda row: f"| {row[1]}     {int(row[2]) + 16}{row[3]}",
        npu_smi(16, health={3: "Alarm"}),
    )
    checks = look(ready, Box(smi=table + PROCESS, taken=(12345 + 30,)))
    assert "the run would use davinci19" in checks["npu-smi"].found
    assert checks["processes on the dies"].found.startswith("davinci17: ")
    assert checks["ports of HCCL"].found == "12345 to 12376: 12375 taken"


@pytest.mark.parametrize("given, entries", [("", 0), ("NoDevFiles", 0), ("3", 1)])
def test_the_list_is_counted_as_ray_counts_it(ready, given, entries, monkeypatch):
    from ray._private.accelerators.npu import NPUAcceleratorManager

    monkeypatch.setenv(LIST, given)
    assert len(NPUAcceleratorManager.get_current_process_visible_accelerator_ids()) == entries
    assert look(ready, Box(shell={LIST: given}))[LIST].found.startswith(f"{entries} entries")


@pytest.mark.parametrize(
    ("shell", "found"),
    [
        ({"HCCL_IF_BASE_PORT": "20000"}, "20002 to 20015: Ray's workers too"),
        ({"HCCL_IF_BASE_PORT": "19988"}, "19988 to 20003: 20002 to 20003: Ray's workers too"),
        ({"HCCL_IF_BASE_PORT": "19986"}, ""),
        ({"HCCL_IF_BASE_PORT": "30000"}, ""),
        ({"RAY_PORT": "12350"}, "12350: Ray's head (RAY_PORT=12350) too; 12351: Ray's client"),
        ({"RAY_PORT": "12344"}, "12345: Ray's client server"),
        ({"RAY_PORT": "12361"}, ""),
        ({"HCCL_IF_BASE_PORT": "52360"}, "52365: Ray's dashboard agent too"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "6370-6390"}, "6380: Ray's head (RAY_PORT=6380) too"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60010"}, "must be auto, or at least 16 ports"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60010, 60100 - 60110"}, ""),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "auto"}, ""),
    ],
)
def test_ports_of_the_launchers_ray_against_hccls(ready, shell, found):
    check = look(ready, Box(shell=shell), own_ray=True)["ports of HCCL"]
    assert (check.state == FAILED) == bool(found) and found in check.found


def test_a_ray_that_will_be_started(ready):
    """As the launchers do: the one that runs is not joined, and the new one is told its CPUs."""
    shell = {"RAY_ADDRESS": "127.0.0.1:1"}
    box = Box(ray=cluster(12), raylets=RAYLET, logical_cpus=8, shell=shell)
    checks = look(ready, box, own_ray=True)
    assert not_passed(checks) == {}
    assert checks["Ray"].found == "one of its own that is started now counts 16"
    assert not_passed(look(ready, box)).keys() == {"ranks", "Ray"}


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
        ("fd00::5:6379", "it must be HOST:PORT"),
        (" 10.0.0.9:6379", "must be HOST:PORT"),
        ("10.0.0.9:99999", "must be HOST:PORT"),
        ("10.0.0.9:", "must be HOST"),
    ],
)
def test_addresses_of_ray(ready, address, found):
    """A Ray is asked only where one listens, by that address; none is ever started."""
    listening = (("10.0.0.9", 6379), ("fd00::5", 6379))
    box = Box(ray=cluster(16), listening=listening, shell={"RAY_ADDRESS": address})
    assert found in look(ready, box)["Ray"].found
    asked = [words.split()[-1] for words, _ in box.asked if "ray.init" in words]
    assert asked == ([address] if found.startswith("one is") else [])


# ---- two nodes ----


def test_two_nodes_of_eight(ready):
    assert not_passed(look(ready, Box(**EIGHT), nodes=2)) == {"HCCL_SOCKET_IFNAME": WARNING}
    one = Box(**EIGHT, ray=cluster(8), raylets=RAYLET)
    assert "1 nodes are missing" in look(ready, one, nodes=2)["Ray"].found
    both = Box(**EIGHT, ray=cluster(16, cpus=640, nodes=2), raylets=RAYLET)
    checks = look(ready, both, nodes=2)
    assert checks["ranks"].state == checks["Ray"].state == PASSED


def test_the_width_of_upstreams_groups(ready):
    """As wide as what the driver's node shows to CANN, and Ray must have such a node."""
    for acl, state in ((8, PASSED), (16, FAILED)):
        ray = cluster(16, cpus=640, nodes=2)
        box = Box(smi=npu_smi(16), acl=acl, ray=ray, raylets=RAYLET)
        assert look(ready, box, nodes=2)["dies of a node"].state == state


def test_cpus_that_no_single_node_has(ready):
    """Two nodes whose 84 are more than the 76, and whose 42 are the 32 of eight ranks and the
    transfer dock's 10.
    """
    for cpus, state in ((86, PASSED), (84, FAILED)):
        box = Box(**EIGHT, ray=cluster(16, cpus=cpus, nodes=2), raylets=RAYLET)
        check = look(ready, box, nodes=2)["CPUs"]
        assert check.state == state
    assert "the nodes have 42, 42 CPUs free; their ranks reserve 32" in check.found


ADDRESSES = "fd00::5 127.0.0.1 0.0.0.0 10.0.0.1:6380 host-1 010.0.0.1 224.0.0.1 10.0.0.1/24"


@pytest.mark.parametrize("value", [*ADDRESSES.split(), " 10.0.0.1"])
def test_addresses_that_nodes_cannot_have(ready, value):
    for name in ("NODE_ADDR", "MASTER_ADDR"):
        checks = look(ready, Box(**EIGHT, shell={name: value}), 2, own_ray=True)
        # only Ray connects to a master
        assert (name in checks) != (name == "MASTER_ADDR" and value == "host-1")
        assert name not in look(ready, Box(**EIGHT, shell={name: "10.0.0.1"}), 2, own_ray=True)


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
    shell = {"HCCL_SOCKET_IFNAME": value, "GLOO_SOCKET_IFNAME": value}
    checks = look(ready, Box(shell=shell))
    assert ("HCCL_SOCKET_IFNAME" in checks) != known
    assert ("GLOO_SOCKET_IFNAME" in checks) != (value in ("eth0", "eth7,eth0", "^eth,lo"))


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("expandable_segments:False,max_split_size_mb:256", False),
        ("page_size:1g,expandable_segments:True", False),
        ("garbage_collection_threshold:0.8", False),
        ("max_split_size_mb:256, expandable_segments: True", True),
        ("expandable_segments:True,garbage_collection_threshold : 0.9", True),
    ],
)
def test_what_torch_npus_allocator_does_not_take_together(ready, text, fails):
    name = "PYTORCH_NPU_ALLOC_CONF"
    checks = not_passed(look(ready, Box(shell={name: text})))
    assert checks == {"variables": WARNING, **({name: FAILED} if fails else {})}


# ---- other engines, other models ----


def test_no_npu_at_all(ready):
    checks = look(ready, Box(**NO_NPU))
    fix = f"python cli/train_grpo.py --config-name {NAME} engine=local rehearsal.enabled=true"
    assert checks["ranks"].state == FAILED and checks["ranks"].fix.endswith(fix)
    assert "CANN's paths" not in checks and "Ray" not in checks
    for name in ("layout", "shape", "base weights"):  # the rest is checked
        assert checks[name].state == PASSED


def test_emulated_npus(ready):
    box = Box(**NO_NPU, logical_cpus=2, hangs=("ray", "npu"))
    checks = look({**ready, "emulate_npu": True}, box)
    assert not_passed(checks) == {"ranks": SKIPPED} and not box.asked
    assert "host memory" not in checks and "base weights" in checks


def test_a_rehearsal(ready):
    """Of a config for NPUs: its layout and its data count, the model and the weights are its own."""
    raw = {**ready, "engine": "local", "rehearsal": {"enabled": True}}
    box = Box(**NO_NPU, reports=[], hangs=("ray", "npu"))
    checks = look(raw, box)
    assert {check.state for check in checks.values()} == {PASSED, SKIPPED}
    assert checks["layout"].state == checks["training rows"].state == PASSED
    raw["actor_config"]["expert_model_parallel_size"] = 3
    failed = {check.group for check in look(raw, box).values() if check.state == FAILED}
    assert failed == {"config"}


def test_the_local_engine(tmp_path):
    key = f"megatron_training.tokenizer_name_or_path={tmp_path}"
    raw = compose("grpo_tiny_moe_cpu", [key, f"task.test_file={tmp_path}/no.parquet"])
    checks = look(raw, Box(**NO_NPU, reports=[], hangs=("ray", "npu")))
    states = not_passed(checks)
    assert states["config.json"] == states["test rows"] == FAILED and states["ranks"] == SKIPPED
    assert not {"base weights", "layout", "torch"} & checks.keys()


def test_a_dense_model_needs_less(tmp_path):
    """Neither ninja, nor the vector cores that HCCL takes."""
    raw = compose("grpo_qwen25_7b_gsm8k_8npu", [f"run.root={tmp_path}"])
    checks = look(raw, Box(without="ninja", shell={"HCCL_OP_EXPANSION_MODE": "AIV"}))
    assert checks["MindSpeed's operators"].state == WARNING
    assert checks["HCCL_OP_EXPANSION_MODE"].state == WARNING


def test_imports_are_tried_where_they_can_be(ready):
    """With what a worker has in its environment; not without NPUs, nor where a package is missing."""
    box = Box()
    check = look(ready, box)["imports of a worker"]
    assert check.found == "imported in 31 s, with the environment of a worker"
    [environment] = [environment for words, environment in box.asked if "importing" in words]
    assert environment["LD_PRELOAD"] == JEMALLOC and environment["VLLM_DP_SIZE"] == "16"
    assert environment["HCCL_IF_BASE_PORT"] == "12345" and environment["HCCL_BUFFSIZE"] == "640"
    check = look(ready, Box(importing=("acl",)))["imports of a worker"]
    assert check.state == SKIPPED and "there is no torch, torch_npu, vllm, " in check.found
    assert "imports of a worker" not in look(ready, Box(**NO_NPU))
