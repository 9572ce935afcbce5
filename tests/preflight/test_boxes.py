"""Played boxes: each fault is found where it is, and nowhere else, with what to type. What
tests/fake_box/cases.py does to real processes is not repeated here.
"""

import re

import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.preflight.case import FAILED, PASSED, WARNING
from tests.preflight.conftest import (
    ATB,
    CANN,
    DRIVER,
    EIGHT,
    GROUPS,
    INSTALLED,
    NAME,
    NO_NPU,
    Box,
    cluster,
    look,
    not_passed,
    npu_smi,
    said,
)

TWELVE, SIXTEEN = (",".join(map(str, range(count))) for count in (12, 16))
LIST = "ASCEND_RT_VISIBLE_DEVICES"
LOST = {"ranks": FAILED}
FEW = {"CANN": WARNING, "Ray": WARNING}
VERSION = {"CANN's version": WARNING}
OTHER = {"variables": WARNING}  # than the engine would set
PORTS = "ports of HCCL"


def shell(**variables):
    return {"shell": variables}


# What is changed of a healthy box, the check that says so, its state, words, and the states of
# others.
CASES = [
    # NPUs
    (dict(nodes=range(12), acl=12), "/dev/davinci*", FAILED, "12 dies", LOST | FEW),
    (dict(shut=("/dev/hisi_hdc",)), "/dev/davinci*", FAILED, "open /dev/hisi_hdc", {}),
    (dict(acl=15), "CANN", FAILED, "15 dies", LOST | {"Ray": WARNING}),
    (dict(acl=None), "CANN", FAILED, "is not installed here", LOST),
    (dict(smi=npu_smi(15)), "npu-smi", FAILED, "15 dies", LOST),
    (dict(smi=None), "npu-smi", WARNING, "is not installed here; health and memory", {}),
    (
        dict(smi=npu_smi(16, used={5: 59000, 6: 3000})),
        "npu-smi",
        FAILED,
        "The plan needs 49.4 GB of the 6.9 GB that are left",
        {},
    ),
    (dict(smi=npu_smi(16, {7: "Warning"})), "npu-smi", PASSED, "16 dies; the first 16", {}),
    (dict(smi="| 16 NPUs |"), "npu-smi", WARNING, "in an unknown form: | 16 NPUs |", {}),
    ({"shell": {LIST: f"1,0,{SIXTEEN[4:]}"}}, LIST, FAILED, "straight to set_device", {}),
    ({"shell": {LIST: "0-15"}}, LIST, FAILED, "1 entries: 0-15", LOST | {"Ray": WARNING}),
    # Ray
    (dict(ray=cluster(16)), "Ray", PASSED, "one is running with 16 NPUs", {}),
    (dict(ray=cluster(12)), "Ray", FAILED, "one is running with 12 NPUs", LOST),
    (
        dict(ray=cluster(16, free=4, jobs=("process 7 (python x.py)",))),
        "Ray",
        FAILED,
        "of which 4 are free; the others are held by process 7 (python x.py): upstream would wait",
        LOST,
    ),
    (dict(ray_hangs=True), "Ray", FAILED, "no answer within 20 s", {}),
    # the host
    # by the numbers of the dies
    (
        dict(smi=None, nodes=range(16, 32), taken=(12370,)),
        PORTS,
        FAILED,
        "12345 to 12376: 12370 taken",
        {"npu-smi": WARNING},
    ),
    (dict(left=0.049), "/tmp", FAILED, "4.9% of its disk are free; below 5 % Ray", {}),
    (dict(room=130 * 10**9), "host memory", WARNING, "130 GB are left (MemAvailable)", {}),
    (dict(taken=(12347,)), PORTS, FAILED, "12345 to 12360: 12347 taken", {}),
    (shell(HCCL_IF_BASE_PORT="65530"), PORTS, FAILED, "must be numbers from 1024 to 65535", OTHER),
    # CANN and compilers
    (
        dict(files={INSTALLED: "version=8.2.RC1"}),
        "CANN's version",
        FAILED,
        "the pin is for 8.3.RC1",
        {},
    ),
    (shell(ATB_HOME_PATH=""), "NNAL", FAILED, "ATB_HOME_PATH is not set", {}),
    (shell(ASCEND_HOME_PATH="/no"), "CANN's paths", FAILED, "no such folder", VERSION),
    (dict(files={DRIVER: "Version=24.1.0"}), "driver", FAILED, "24.1.0; MindSpeed-RL's", {}),
    (
        {"there": ("/fast/gmm/lock",)} | shell(TORCH_EXTENSIONS_DIR="/fast"),
        "MindSpeed's operators",
        FAILED,
        "left by a build that was killed",
        {},
    ),
    (
        dict(files={INSTALLED: "version=8.4.0"}),
        "CANN's version",
        WARNING,
        "run for 8.5.0 and 8.3.RC1",
        {},
    ),
    (dict(files={INSTALLED: ""}), "CANN's version", WARNING, "in no ascend_*_install.info", {}),
    (dict(without="ninja"), "compilers", FAILED, "ninja is not installed here: rank 0", {}),
    # versions
    ({"packages": {"torch_npu": None}}, "torch_npu", FAILED, "not installed", {}),
    ({"packages": {"numpy": "2.2.6"}}, "numpy", FAILED, "error code is 500001", {}),
    ({"packages": {"vllm": "0.11.0rc2"}}, "vllm", FAILED, "0.11.0rc2 is installed", {}),
    ({"packages": {"torch": "2.7.10"}}, "torch", FAILED, "2.7.10 is installed", {}),
    ({"packages": {"ray": "2.42.1"}}, "ray", WARNING, "2.42.1 is installed, the pin is", {}),
    # the shell
    (shell(VLLM_ASCEND_ENABLE_NZ="1"), "VLLM_ASCEND_ENABLE_NZ", FAILED, "trains with 0", OTHER),
    (shell(HCCL_CONNECT_TIMEOUT="120"), "variables", WARNING, "engine would set '1800'", {}),
    (shell(HCCL_IF_IP="10.9.9.9"), "HCCL_IF_IP", FAILED, "of this machine has it", {}),
    (shell(HCCL_OP_EXPANSION_MODE="AIV"), "HCCL_OP_EXPANSION_MODE", FAILED, "107020", {}),
    (shell(VLLM_PLUGINS="lora,ascending"), "VLLM_PLUGINS", FAILED, "to infer device type", {}),
    (shell(HCCL_IF_IP="FE80::1%eth0"), "HCCL_IF_IP", None, "", {}),
    (shell(HCCL_IF_BASE_PORT="19988"), PORTS, FAILED, "20002, 20003 of Ray", OTHER),
    (shell(RAY_PORT="12344"), PORTS, FAILED, "12345 of Ray", {}),
    (shell(RAY_ADDRESS="10.0.0.9:12360"), PORTS, FAILED, "12360 of Ray", {"Ray": FAILED}),
    (
        shell(PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold : 0.9"),
        "PYTORCH_NPU_ALLOC_CONF",
        FAILED,
        "does not take them together",
        OTHER,
    ),
    # harmless
    (
        shell(
            ASCEND_OPP_PATH=f"{CANN}/opp",
            VLLM_USE_V1="1",
            OMP_PROC_BIND="false",
            HCCL_OP_EXPANSION_MODE="AI_CPU",
            VLLM_PLUGINS="ascend,ascend_enhanced_model",
        ),
        "variables",
        PASSED,
        "HCCL_OP_EXPANSION_MODE, OMP_PROC_BIND, VLLM_PLUGINS",
        {},
    ),
]


@pytest.mark.parametrize("change, name, state, found, more", CASES)
def test_a_box(ready, change, name, state, found, more):
    checks = look(ready, Box(**change))
    expected = {**more, name: state} if state not in (PASSED, None) else more
    assert not_passed(checks) == expected
    if state is None:
        assert name not in checks
    else:
        said(checks, name, found, state)


def test_a_box_that_is_ready(ready):
    checks = look(ready)
    assert not_passed(checks) == {}
    assert not any(check.fix for check in checks.values())
    assert (
        checks["ranks"].found == "16 asked for here; npu-smi 16, /dev/davinci* 16, CANN 16, Ray 16"
    )
    assert "TP 1 PP 1 EP 16 DP 16" in checks["layout"].found
    assert checks["base weights"].found.startswith("TP 1 PP 1 EP 16 needs 16 files")
    assert tuple(dict.fromkeys(check.group for check in checks.values())) == GROUPS


def test_the_dies_that_a_run_takes(ready):
    """The first that are mapped: others may be sick, or used by others; Ray's number goes to
    set_device.
    """
    ready["rl_config"]["actor_resource"]["num_npus"] = 12
    sick = npu_smi(16, health={13: "Critical"}, used={14: 60000})
    assert look(ready, Box(smi=sick))["npu-smi"].state == PASSED
    box = Box(shell={LIST: ",".join(map(str, range(4, 16)))})
    assert look(ready, box)[LIST].fix.endswith(f"export {LIST}={TWELVE}")
    assert look(ready, Box(shell={LIST: TWELVE}))[LIST].state == PASSED


def test_dies_that_the_container_has_under_other_names(ready):
    """16 nodes named 0 to 15, and Phy-IDs of 16 to 31: all are used."""
    table = re.sub(
        r"(?m)^\| ([01])     (\d+)( +\| 0000)",
        lambda row: f"| {row[1]}     {int(row[2]) + 16}{row[3]}",
        npu_smi(16, health={3: "Alarm"}),
    )
    checks = look(ready, Box(smi=table))
    assert "which the run uses, davinci19: Alarm" in checks["npu-smi"].found


@pytest.mark.parametrize("given, entries", [("", 0), ("3", 1)])
def test_the_list_is_counted_as_ray_counts_it(ready, given, entries, monkeypatch):
    from ray._private.accelerators.npu import NPUAcceleratorManager

    monkeypatch.setenv(LIST, given)
    assert len(NPUAcceleratorManager.get_current_process_visible_accelerator_ids()) == entries
    assert look(ready, Box(shell={LIST: given}))[LIST].found.startswith(f"{entries} entries")


def test_a_ray_that_will_be_started(ready):
    """As the launchers do: the one that runs is not joined."""
    box = Box(ray=cluster(12), shell={"RAY_ADDRESS": "127.0.0.1:1"})
    assert not_passed(look(ready, box, own_ray=True)) == {}
    assert not_passed(look(ready, box)) == {"Ray": FAILED}


@pytest.mark.parametrize(
    "address, found",
    [
        ("local", "16 dies"),
        ("", "one is running with 16"),
        ("10.0.0.9:6379", "one is running with 16"),
        ("[fd00::5]:6379", "one is running with 16"),
        ("10.0.0.8:6379", "nothing listens there"),
        ("ray://10.0.0.9:10001", "Ray's client cannot"),
        ("fd00::5:6379", "it must be HOST:PORT"),
    ],
)
def test_addresses_of_ray(ready, address, found):
    """A Ray is asked only where one listens, by that address; none is ever started."""
    listening = ("10.0.0.9:6379", "[fd00::5]:6379")
    box = Box(ray=cluster(16), listening=listening, shell={"RAY_ADDRESS": address})
    assert found in look(ready, box)["Ray"].found
    asked = [words.split()[-1] for words, _ in box.asked if "ray.init" in words]
    assert asked == ([address or "auto"] if found.startswith("one is") else [])


# ---- two nodes ----


def test_two_nodes_of_eight(ready):
    ready["npu"] = {"ranks_per_node": 8}
    assert not_passed(look(ready, Box(**EIGHT))) == {}
    one = look(ready, Box(**EIGHT, ray=cluster(8)))
    said(one, "Ray", "with 8 NPUs on 1 nodes: upstream would wait for 16")
    both = Box(**EIGHT, ray=cluster(16, cpus=640, nodes=2))
    assert not_passed(look(ready, both)) == {}


def test_values_that_do_harm(ready):
    ray = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    fatal = {ray: ""} | dict(
        VLLM_USE_V1="0", VLLM_VERSION="0.9.2", RANK_TABLE_FILE="/x", OMP_PROC_BIND="true"
    )
    doubtful = dict.fromkeys(("HCCL_INTRA_ROCE_ENABLE", "RAY_grpc_enable_http_proxy"), "True")
    states = not_passed(look(ready, Box(shell=fatal | doubtful)))
    states.pop("variables")
    assert states == dict.fromkeys(fatal, FAILED) | dict.fromkeys(doubtful, WARNING)


@pytest.mark.parametrize(
    "value, known",
    [("eth0", True), ("eth7,eth0", True), ("=eth0", True), ("^eth,lo", True), ("eth7", False)],
)
def test_the_interfaces_of_hccl(ready, value, known):
    checks = look(ready, Box(shell={"HCCL_SOCKET_IFNAME": value}))
    assert ("HCCL_SOCKET_IFNAME" in checks) != known


# ---- other engines, other models ----


def test_no_npu_at_all(ready):
    checks = look(ready, Box(**NO_NPU))
    fix = f"python cli/train_grpo.py --config-name {NAME} engine=local rehearsal.enabled=true"
    assert checks["ranks"].state == FAILED and checks["ranks"].fix.endswith(fix)
    assert "CANN's paths" not in checks and "Ray" not in checks
    for name in ("layout", "config.json", "base weights"):  # the rest is checked
        assert checks[name].state == PASSED


@pytest.mark.parametrize(
    "change", [{"emulate_npu": True}, {"engine": "local"}, {"rehearsal": {"enabled": True}}]
)
def test_a_run_without_npus_needs_no_preflight(ready, change):
    with pytest.raises(ConfigError, match="uses no NPU: the preflight is for those that do"):
        look({**ready, **change})


def test_imports_of_a_worker(ready):
    """With what a worker has in its environment; not without NPUs."""
    box = Box()
    check = look(ready, box)["imports of a worker"]
    assert check.found == "imported in 31 s, with the environment of a worker"
    [environment] = [environment for words, environment in box.asked if "importing" in words]
    assert environment["ATB_HOME_PATH"] == ATB and environment["VLLM_DP_SIZE"] == "16"
    assert environment["HCCL_IF_BASE_PORT"] == "12345" and environment["HCCL_BUFFSIZE"] == "640"
    assert "imports of a worker" not in look(ready, Box(**NO_NPU))
    box = Box(imported="cannot import vllm: ImportError: libascend_hal.so: no\n")
    assert "/usr/local/Ascend/driver" in look(ready, box)["imports of a worker"].fix
