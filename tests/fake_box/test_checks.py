"""The rows of docs/preflight.md through the real preflight, in fake boxes: what is broken, the check that says so, its
state, its words and what to type."""

import json
import zipfile
from pathlib import Path

import pytest

from mindspeed_qerl.rehearsal.model import train_tokenizer
from mindspeed_qerl.tasks.packed import indexed_format
from mindspeed_qerl.tasks.prompts import chat_ids
from mindspeed_qerl.tasks.rows import read_rows
from tests.fake_box import GB, OF_THE_HOST, Box, run, why_not
from tests.fake_box.prepared import prepare

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
THIRTY = "grpo_qwen3_30b_a3b_gsm8k"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4096\n"
NETWORK = {"HCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "eth7", "HCCL_IF_IP": "10.9.9.9",
           "RANK_TABLE_FILE": "/nowhere/ranks.json"}
TWO = Box(dies=8)


@pytest.fixture(scope="module", params=[f"{THIRTY}_16npu"])
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "of"
    return prepare(request.param, folder)


def preflight(box, name, folder, *options, files, **environment) -> dict[str, dict]:
    """Each check of the real tools/preflight.py in that box, by name."""
    done = run(box, ["python", "tools/preflight.py", "--config-name", name, "--json", *options], folder,
               {"PATH": "/usr/bin:/bin", "HOME": str(folder), **files, **environment}, sourced=True)
    assert done.stdout and "Traceback" not in done.stderr, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert not [check for check in checks.values() if "could not be checked" in check["found"]]
    return checks


def look(box, folder, *options, files, before: str = "", **environment) -> tuple[int, str, str]:
    """Exit status and both outputs of the preflight as it is printed, after a line of shell."""
    command = f"{before}\nexec python tools/preflight.py --config-name {THIRTY}_16npu --own-ray \"$@\""
    done = run(box, ["bash", "-c", command, "bash", *options], folder,
               {"PATH": "/usr/bin:/bin", "HOME": str(folder), **files, **environment}, sourced=True)
    return done.returncode, done.stdout, done.stderr


def wrong(checks) -> dict[str, str]:
    return {name: check["state"] for name, check in checks.items()
            if check["state"] not in ("passed", "skipped") and name not in OF_THE_HOST}


CASES = {  # box, environment, {check: (state, words of what is found, words of what to type)}
    "a sick die that is not needed": (f"{THIRTY}_12npu", Box(sick={13: "Critical"}), {}, {}),
    "a sick die among the first twelve": (f"{THIRTY}_12npu", Box(sick={3: "Alarm"}), {}, {
        "ranks": ("failed", "Lost at npu-smi", ""),
        "npu-smi": ("failed", "the run would use davinci3, of the first 12", "--device=/dev/davinci4")}),
    "58 of 64 GB held": (f"{THIRTY}_16npu", Box(used={5: 59000}), {}, {
        "ranks": ("failed", "Lost at npu-smi", ""),
        "npu-smi": ("failed", "NPU 2 chip 1 (59,000 of 65,536 MB). The plan's 26.9 GB do not fit into the 6.9 GB",
                    "npu-smi info"), "processes on the dies": ("warning", "davinci5: python3.11 (process 632", "")}),
    "12 of 64 GB held": (f"{THIRTY}_16npu", Box(used={5: 12000}), {}, {
        "npu-smi": ("warning", "The plan's 26.9 GB fit beside it", "npu-smi info"),
        "processes on the dies": ("warning", "davinci5: python3.11 (process 632273, 9000 MB)", "on the host")}),
    "a process that holds little": (f"{THIRTY}_16npu", Box(used={0: 3416, 9: 3416}), {}, {"processes on the dies": (
        "warning", "davinci0: python3.11 (process 632268, 416 MB); davinci9: python3.11", "without --privileged")}),
    "npu-smi hangs": (f"{THIRTY}_16npu", Box(smi="hangs"), {}, {
        "ranks": ("failed", "Lost at npu-smi", ""),
        "npu-smi": ("failed", "no answer within 20 s", "ps -eo pid,stat,args")}),
    "npu-smi prints an error": (
        f"{THIRTY}_16npu", Box(smi="dcmi model initialized failed, because the device is used. ret is -8020"), {}, {
            "npu-smi": ("warning", "because the device is used. ret is -8020", "another container")}),
    "507033": (f"{THIRTY}_16npu", Box(acl_error=507033), {}, {
        "ranks": ("failed", "Lost at CANN", ""), "Ray": (None, "", ""),
        "CANN": ("failed", "gives error 507033: a device cannot be started", "~/ascend/log/debug/plog")}),
    "CANN 8.2.RC1": (f"{THIRTY}_16npu", Box(cann="8.2.RC1"), {}, {
        "CANN's version": ("failed", "8.2.RC1; MindSpeed at the pin is for 8.3.RC1", "CANN 8.5.0")}),
    "driver 24.1.0": (f"{THIRTY}_16npu", Box(driver="24.1.0"), {}, {
        "driver": ("failed", "24.1.0; MindSpeed-RL's guide names 25.5.0", "on the host")}),
    "no NNAL": (f"{THIRTY}_16npu", Box(nnal=False), {}, {
        "NNAL": ("failed", "ATB_HOME_PATH is not set", "nnal/atb/set_env.sh")}),
    "23 GB": (f"{THIRTY}_16npu", Box(memory=32 * GB, free=23 * GB), {}, {
        "host memory": ("failed", "16 ranks load 107 GB of base weights at once", "--memory")}),
    "a container of 100 GB": (f"{THIRTY}_16npu", Box(cgroup={"memory.max": f"{100 * GB}", "memory.current": f"{GB}"}),
                              {}, {"host memory": ("failed", "99.0 GB are left (/sys/fs/cgroup/memory.max = 100.0 GB)",
                                                   "--memory")}),
    "enough for the weights, not for the processes": (f"{THIRTY}_16npu", Box(free=130 * GB), {}, {
        "host memory": ("warning", "130 GB are left (MemAvailable)", "--memory")}),
    "ports beyond the last": (f"{THIRTY}_16npu", Box(), {"HCCL_IF_BASE_PORT": "65530"}, {
        "ports of HCCL": ("failed", "HCCL_IF_BASE_PORT=65530 must be a whole number from 1024 to 65520",
                          "unset HCCL_IF_BASE_PORT"), "HCCL_IF_BASE_PORT": (None, "", "")}),
    "ports that are none": (f"{THIRTY}_16npu", Box(), {"HCCL_IF_BASE_PORT": "abc"}, {
        "ports of HCCL": ("failed", "HCCL_IF_BASE_PORT=abc must be", "unset HCCL_IF_BASE_PORT"),
        "HCCL_IF_BASE_PORT": (None, "", "")}),
    "ports that are drawn": (f"{THIRTY}_16npu", Box(files={"/proc/sys/net/ipv4/ip_local_port_range": "1024 65535\n"}),
                             {}, {"ports of HCCL": ("warning", "inside net.ipv4.ip_local_port_range = 1024-65535",
                                                    "net.ipv4.ip_local_reserved_ports=12345-12360")}),
    "variables of another machine": (f"{THIRTY}_16npu", Box(), NETWORK, {
        "HCCL_SOCKET_IFNAME": ("failed", "eth7: no network interface of this machine is that; here are lo",
                               "unset HCCL_SOCKET_IFNAME"),
        "GLOO_SOCKET_IFNAME": ("failed", "eth7", "unset GLOO_SOCKET_IFNAME"),
        "HCCL_IF_IP": ("failed", "10.9.9.9: no network interface of this machine has it", "unset HCCL_IF_IP"),
        "RANK_TABLE_FILE": ("failed", "/nowhere/ranks.json, which cannot be read", "unset RANK_TABLE_FILE")}),
    "variables of a recipe": (f"{THIRTY}_16npu", Box(), {
        "HCCL_OP_EXPANSION_MODE": "AIV", "OMP_PROC_BIND": "true", "VLLM_PLUGINS": "lora_filesystem_resolver",
        "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050", "VLLM_ASCEND_ENABLE_FLASHCOMM": "1"}, {
        "HCCL_OP_EXPANSION_MODE": ("failed", "the dispatch of experts (vLLM's EP 16) waits for",
                                   "unset HCCL_OP_EXPANSION_MODE"),
        "OMP_PROC_BIND": ("failed", "to one core", "unset OMP_PROC_BIND"),
        "VLLM_PLUGINS": ("failed", "Failed to infer device type", "unset VLLM_PLUGINS"),
        "HCCL_NPU_SOCKET_PORT_RANGE": ("warning", "of a guide for several nodes", "unset HCCL_NPU_SOCKET_PORT_RANGE"),
        "other variables": ("passed", "VLLM_ASCEND_ENABLE_FLASHCOMM: neither the engine nor set_env.sh", "")}),
    "AIV without experts": ("grpo_qwen25_7b_gsm8k_8npu", Box(dies=8, kind="910B3"), {
        "HCCL_OP_EXPANSION_MODE": "AIV"}, {
            "HCCL_OP_EXPANSION_MODE": ("warning", "with experts vLLM was seen", "unset HCCL_OP_EXPANSION_MODE")}),
    "helpers that cannot be compiled": (f"{THIRTY}_16npu", Box(compiled=False, without=("g++",)), {}, {
        "Megatron's helpers": ("failed", "g++ is not installed here; no pybind11/", "pip install pybind11")}),
    "vllm-ascend as a checkout, numpy 2, triton": (
        f"{THIRTY}_16npu", Box(installed=False, packages={"numpy": "2.2.6", "triton": "3.4.0"}), {}, {
            "vLLM's platform": ("failed", "Failed to infer device type", "python setup.py install"),
            "vllm-ascend's operators": ("warning", "no vllm_ascend_C*.so in", "python setup.py install"),
            "numpy": ("failed", "error code is 500001", "pip install numpy==1.26.4"),
            "triton": ("warning", "0 active drivers", "pip uninstall --yes triton")}),
    "no make": (f"{THIRTY}_16npu", Box(without=("make",)), {}, {
        "Megatron's helpers": ("failed", "make is not installed here", "apt install build-essential")}),
    "a Ray that is gone": (f"{THIRTY}_16npu", Box(), {"RAY_ADDRESS": "127.0.0.1:1"}, {
        "ranks": ("failed", "Lost at Ray", ""),
        "Ray": ("failed", "RAY_ADDRESS=127.0.0.1:1 cannot be joined: nothing listens there", "unset RAY_ADDRESS")}),
}


@pytest.mark.full
@pytest.mark.parametrize("title", CASES)
def test_a_broken_box(title, files, tmp_path):
    name, box, environment, expected = CASES[title]
    files = files if name.endswith("_16npu") else prepare(name, tmp_path / "files")
    options = [] if "RAY_ADDRESS" in environment else ["--own-ray"]
    checks = preflight(box, name, tmp_path / "box", *options, files=files, **environment)
    for check, (state, found, fix) in expected.items():
        if state:
            assert checks[check]["state"] == state and found in checks[check]["found"], checks[check]
            assert fix in checks[check]["fix"], checks[check]
    assert wrong(checks).keys() <= expected.keys(), wrong(checks)


@pytest.mark.full
def test_two_healthy_nodes_and_two_that_show_all_their_dies(tmp_path):
    """Upstream takes what the driver's node shows for the width of every group; Ray has 8 in each node."""
    files, name = prepare(f"{THIRTY}_2x8npu", tmp_path / "files", nodes=2), f"{THIRTY}_2x8npu"
    options = ("--nodes", "2", "--own-ray")
    assert wrong(preflight(TWO, name, tmp_path / "eight", *options, files=files)) == {}
    checks = preflight(Box(), name, tmp_path / "sixteen", *options, files=files)
    assert wrong(checks) == {"ranks": "failed", "dies of a node": "failed"}
    assert checks["dies of a node"]["found"] == (
        "this node shows 16 to CANN, and upstream asks Ray for groups of 16 on one node each (launcher.py:64-101); "
        "the nodes have 8, 8 for the run: it would wait for ever")
    assert checks["dies of a node"]["fix"].startswith("export ASCEND_RT_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 ")
    visible = {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert wrong(preflight(Box(), name, tmp_path / "masked", *options, files=files, **visible)) == {}


# ---- files ----

@pytest.fixture
def own(tmp_path):
    """Files of this test, to be broken: (variables, model, converted base, packed training data)."""
    files = prepare(f"{THIRTY}_16npu", tmp_path / "files")
    models, data = Path(files["MODELS"]), Path(files["DATA"]) / "gsm8k"
    return files, models / "Qwen3-30B-A3B", models / "Qwen3-30B-A3B-tp1-pp1-ep16", data


def checked(own, tmp_path, *options):
    return preflight(Box(), f"{THIRTY}_16npu", tmp_path / "box", "--own-ray", *options, files=own[0])


@pytest.mark.parametrize(("key", "value", "found"), [
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
     "rope_type is 'yarn'; only 'default' is built"),
    ("tie_word_embeddings", True, "untie_embeddings_and_output_weights = True in the config, but tie_word_embeddings"),
    ("max_position_embeddings", 2048, "generate_config.max_model_len = 2560, and max_position_embeddings = 2048"),
])
def test_a_config_json_of_another_model(own, tmp_path, key, value, found):
    file = own[1] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    checks = checked(own, tmp_path)
    [name] = set(wrong(checks)) - {"weights"}  # tied embeddings are fewer
    assert checks[name]["state"] == "failed" and found in checks[name]["found"]


def test_base_weights_of_another_size(own, tmp_path):
    """Sixteen whole zips, each of a few bytes."""
    for file in own[2].glob("iter_*/*/*.pt"):
        with zipfile.ZipFile(file, "w") as whole:
            whole.writestr("data.pkl", file.parent.name)
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"base weights": "failed"}
    assert "a rank's share of this model is 6.7 GB: weights of another model?" in checks["base weights"]["found"]


def test_pointers_of_git_lfs(own, tmp_path):
    for file in (own[1] / "model-00001-of-00001.safetensors", own[1] / "tokenizer.json",
                 *own[2].glob("iter_*/*/*.pt")):
        file.write_text(POINTER)
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"weights": "warning", "tokenizer": "failed", "base weights": "failed"}
    assert "16 of 16 files are pointers of git-lfs" in checks["base weights"]["found"]
    assert all(checks[name]["fix"].endswith("git lfs pull)") for name in wrong(checks))
    (own[2] / "latest_checkpointed_iteration.txt").unlink()  # then the conversion needs them
    assert wrong(checked(own, tmp_path))["weights"] == "failed"


def test_half_a_download(own, tmp_path):
    with open(own[1] / "model-00001-of-00001.safetensors", "r+b") as file:
        file.truncate(30 * GB)
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"weights": "warning"} and "30.0 GB, and the model of config.json has 61.1 GB" in checks[
        "weights"]["found"]


def test_the_test_split_in_place_of_the_training_files(own, tmp_path):
    data = own[3]
    (data / "train_chat.parquet").write_bytes((data / "test_chat.parquet").read_bytes())
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"train and test": "failed"}
    assert "1,319 of 1,319 test questions are training questions too" in checks["train and test"]["found"]


@pytest.mark.full
def test_packed_prompts_of_the_test_split(own, tmp_path):
    """By what they say, read back with the model's tokenizer; without one, by their number."""
    rows = read_rows(own[3] / "test_chat.parquet")
    tokenizer = train_tokenizer([row.question for row in rows], 600)
    tokenizer.save_pretrained(own[1])
    for column, ids in (("input_ids", [chat_ids(tokenizer, row) for row in rows]), ("labels", [[1]] * len(rows))):
        for ending, content in zip(("bin", "idx"), indexed_format(ids)):
            next((own[3] / "Qwen3-30B-A3B").glob(f"*_packed_{column}_document.{ending}")).write_bytes(content)
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"train and test": "failed"}
    assert checks["train and test"]["found"] == "189 of 189 test questions are among the packed training prompts"
    (own[1] / "tokenizer.json").write_text("{}")
    checks = checked(own, tmp_path)
    assert wrong(checks) == {"train and test": "failed"} and checks["train and test"]["found"] == (
        "1,319 packed prompts, as many as there are test rows; train_chat.parquet has 7,473: they are not of one "
        "conversion")
    assert wrong(checked(own, tmp_path, "task.allow_overlap=true")) == {"train and test": "warning"}


# ---- the shell, upstream, Ray ----

def test_a_run_root_that_is_read_only(files, tmp_path):
    (tmp_path / "runs").mkdir()
    status, output, _ = look(Box(), tmp_path / "box", f"run.root={tmp_path}/runs/here", files=files,
                             before=f"mount --bind {tmp_path}/runs {tmp_path}/runs && mount -o remount,ro,bind "
                                    f"{tmp_path}/runs")
    assert status == 1 and "run.root" in output and "cannot be written" in output
    assert "1 failed" in output.splitlines()[-1]


@pytest.mark.parametrize(("before", "found"), [
    ("mkdir -p /tmp/c/torch_extensions/py311_cpu/gmm && touch /tmp/c/torch_extensions/py311_cpu/gmm/lock",
     "/tmp/c/torch_extensions/py311_cpu/gmm/lock: left by a build that was killed"),
    ("mkdir /tmp/c && mount -t tmpfs -o noexec none /tmp/c", "/tmp/c/torch_extensions is mounted noexec"),
    ("mkdir /tmp/c && mount -t tmpfs -o ro none /tmp/c", "/tmp/c/torch_extensions cannot be written")])
def test_operators_that_cannot_be_compiled(before, found, files, tmp_path):
    _, output, _ = look(Box(), tmp_path / "box", "--json", files=files, XDG_CACHE_HOME="/tmp/c", before=before)
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks) == {"MindSpeed's operators": "failed"}
    assert found in checks["MindSpeed's operators"]["found"]


WITHOUT_DAC_OVERRIDE = f"""
touch /tmp/shut && chmod 0 /tmp/shut && mount --bind /tmp/shut /dev/davinci5
exec setpriv --bounding-set=-dac_override,-dac_read_search \\
    python tools/preflight.py --config-name {THIRTY}_16npu --own-ray "$@"
"""
ELSEWHERE = """exec python -c '
import os, socket, sys
listener = socket.create_server(("", 12353))
listener.set_inheritable(True)
os.execvp("python", ["python", "tools/preflight.py", "--config-name", "grpo_qwen25_7b_gsm8k_8npu", "--own-ray",
                     *sys.argv[1:]])' "$@"
"""


@pytest.mark.parametrize(("name", "box", "before", "wrong_ones", "found"), [
    (f"{THIRTY}_16npu", Box(), "umount /dev/hisi_hdc && rm /dev/hisi_hdc\n", {"/dev/davinci*", "ranks"},
     ("/dev/davinci*", "16 device nodes, and /dev/hisi_hdc is not there")),
    (f"{THIRTY}_16npu", Box(), WITHOUT_DAC_OVERRIDE, {"/dev/davinci*", "ranks"},
     ("/dev/davinci*", "/dev/davinci5 is ---------- of user 0, group 0: user 0 cannot open it")),
    ("grpo_qwen25_7b_gsm8k_8npu", Box(lost=tuple(range(8))), ELSEWHERE, {"ports of HCCL"},
     ("ports of HCCL", "12345 to 12360: 12353 taken")),
], ids=["not mapped", "not to be opened", "ports of others"])
def test_device_nodes(name, box, before, wrong_ones, found, tmp_path):
    _, output, complaint = look(box, tmp_path / "box", "--json", files=prepare(name, tmp_path / "files"),
                                before=before)
    assert output, complaint
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks).keys() == wrong_ones and found[1] in checks[found[0]]["found"]


def test_a_disk_of_rays_folder_that_is_full(files, tmp_path):
    _, output, _ = look(Box(), tmp_path / "box", "--json", files=files,
                        before="mount -o remount,size=1M /tmp && head -c 1000K /dev/zero > /tmp/full")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks) == {"/tmp": "failed"} and "below 5 % Ray spills no object" in checks["/tmp"]["found"]


def test_a_cann_that_is_not_there(files, tmp_path):
    status, output, _ = look(Box(), tmp_path / "box", files=files, before="export ASCEND_HOME_PATH=/nowhere")
    assert status == 1 and "ASCEND_HOME_PATH=/nowhere: there is no such folder" in output


def test_an_nnal_that_was_sourced_for_another_torch_too(files, tmp_path):
    _, output, _ = look(Box(), tmp_path / "box", "--json", files=files,
                        before="export LD_LIBRARY_PATH=/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib:"
                               "$LD_LIBRARY_PATH")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks) == {"NNAL": "warning"} and "cxx_abi_0 and cxx_abi_1" in checks["NNAL"]["found"]


def test_another_mindspeed_first_on_the_path(files, tmp_path):
    other = tmp_path / "elsewhere" / "mindspeed"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("VERSION = 2.2\n")
    _, output, _ = look(Box(), tmp_path / "box", "--json", files=files,
                        before=f"export PYTHONPATH={other.parent}:$PYTHONPATH")
    check = next(check for check in json.loads(output)["checks"] if check["name"] == "MindSpeed")
    assert check["state"] == "warning" and check["found"].startswith(
        f"MindSpeed in {other.parent} is an unknown version (no git checkout), not the pin ac9f0e7")


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
def test_a_ray_in_which_another_job_holds_npus(files, tmp_path):
    (tmp_path / "holder.py").write_text(HOLDER)
    done = run(Box(), ["python", str(tmp_path / "holder.py"), "tools/preflight.py", "--config-name", f"{THIRTY}_16npu",
                       "--json"], tmp_path / "box", {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **files},
               sourced=True)
    pid, _, output = done.stdout.partition("\n")
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert wrong(checks) == {"ranks": "failed", "Ray": "failed"}, done.stdout
    assert "one is running with 16 NPUs, of which 4 are free; the others are held by process " + pid in checks["Ray"][
        "found"] and "holder.py" in checks["Ray"]["found"]
    assert "4 of 16 asked for" in checks["ranks"]["found"]


# ---- accepted ----

@pytest.mark.full
def test_a_check_that_is_accepted(files, tmp_path):
    box = Box(cann="8.2.RC1", driver="24.1.0")
    status, output, _ = look(box, tmp_path / "0", files=files)
    assert status == 1 and "--accept NAME, of canns-version, driver; the run directory keeps it" in output
    status, output, _ = look(box, tmp_path / "1", "--accept", "CANN's version", "--accept", "driver", files=files)
    assert status == 0 and output.splitlines()[-1].startswith("2 accepted, ") and "8.2.RC1; MindSpeed" in output
    status, output, _ = look(box, tmp_path / "2", "run.accepted_checks=[canns-version,nnal]", files=files)
    assert status == 1 and "1 failed, 1 accepted" in output.splitlines()[-1]
    assert "nnal: accepted, and has not failed" in output
    status, output, _ = look(Box(), tmp_path / "3", "--accept", "driverr", files=files)
    assert status == 1 and "unknown check 'driverr', did you mean 'driver'" in output
    assert look(Box(sick={3: "Alarm"}), tmp_path / "4", "--accept", "npu-smi", files=files)[0] == 0


def test_what_the_engine_refuses_cannot_be_accepted(own, tmp_path):
    file = own[1] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 1e7}))
    status, output, _ = look(Box(), tmp_path / "box", "--accept", "rotary base", files=own[0])
    assert status == 1 and "rotary-base cannot be accepted" in output
    assert output.splitlines()[-1].startswith("2 failed, ")
