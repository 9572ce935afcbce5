"""examples/grpo: what the launchers would do, what they do where no NPU is, and that they stop the
Ray that they started; no other by name (test_shellcheck).
"""

import importlib
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from functools import cache, partial
from itertools import count
from pathlib import Path

import psutil
import pytest

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.preflight.host import ports_of_ray
from tests import ROOT
from tests.fake_box.nodes import Launcher

FOLDER = ROOT / "examples" / "grpo"
LAUNCHERS = sorted(FOLDER.glob("grpo_trainer*.sh"))
DRY_RUNS = Path(__file__).parent / "dry_runs.md"
BIN = Path(sys.executable).parent

# In place of python: the launcher's own helpers run, everything else is written down. With TRAINING
# it stands in for a training.
PYTHON = f"""#!/usr/bin/env bash
case $1 in
    examples/grpo/*) exec {sys.executable} "$@" ;;
esac
echo "python $*" >> "$RECORD"
[[ "$*" != *cli/train_grpo.py* || -z ${{TRAINING:-}} ]] || exec {sys.executable} "$TRAINING"
"""
TRAINING = """
import os, signal, sys
import ray

print("warming up", flush=True)
print("Run directory: " + os.environ["RUN"], flush=True)
try:
    ray.init(address="auto", runtime_env={"env_vars": {"A": "b"}}, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the engine does, after ray.init
    print("NPUs", ray.cluster_resources()["NPU"], flush=True)
    print("asked", ray.get(ray.remote(lambda: os.environ["A"]).options(resources={"NPU": 1}).remote()), flush=True)
    with open(os.environ["GO"]) as file:
        sys.exit(int(file.read()))
except KeyboardInterrupt:
    signal.signal(signal.SIGTERM, lambda *_: print("told again", flush=True))
    print("told to stop", flush=True)
    ray.shutdown()
"""


def make_machine(folder):
    """An environment in which python and ray write down that they were called, and everything that
    a launcher looks for is there.
    """
    fakes = folder / "bin"
    fakes.mkdir()
    (fakes / "python").write_text(PYTHON)
    (fakes / "ray").write_text('#!/usr/bin/env bash\necho "ray $*" >> "$RECORD"\n')
    for file in (
        "Ascend/cann/set_env.sh",
        "Ascend/nnal/atb/set_env.sh",
        "libjemalloc.so.2",
        "record",
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    return {
        "PATH": f"{fakes}:{BIN}:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": "/home/user",
        "BOX_LOCK": str(folder / "lock"),
        "RECORD": str(folder / "record"),
        "ASCEND_ROOT": str(folder / "Ascend"),
        "JEMALLOC": str(folder / "libjemalloc.so.2"),
        "MODELS": "/data/models",
        "DATA": "/data",
        "PYTHON": "python",
    }


@pytest.fixture
def machine(tmp_path):
    return make_machine(tmp_path)


def few_files():
    """A shell's usual soft limit, on any machine."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def launch(machine, script, *arguments, cwd=ROOT):
    return subprocess.run(
        ["bash", str(script), *arguments],
        check=False,
        cwd=cwd,
        env=machine,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=few_files,
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """A function that launches with --dry-run once for all that look at it; the paths of its
    machine read as on a box.
    """
    machine = make_machine(tmp_path_factory.mktemp("machine"))

    @cache
    def shown(*words):
        """words: VARIABLE=value ..., then the launcher and its arguments."""
        start = next(place for place, word in enumerate(words) if word.endswith(".sh"))
        result = launch(
            {**machine, **dict(word.split("=", 1) for word in words[:start])}, *words[start:]
        )
        assert result.returncode == 0 and recorded(machine) == "", result
        result.stdout = result.stdout.replace(machine["ASCEND_ROOT"], "/usr/local/Ascend").replace(
            machine["JEMALLOC"], "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2"
        )
        return result

    return shown


def commands(result):
    """The words of each command that was shown."""
    return [shlex.split(line)[1:] for line in result.stdout.splitlines() if line.startswith("+ ")]


def recorded(machine):
    return Path(machine["RECORD"]).read_text()


def test_shellcheck():
    """What the launchers source once, with one of them: it is most of the work."""
    files = [str(file.relative_to(ROOT)) for file in sorted(FOLDER.glob("*.sh"))]
    first, *named = [str(file.relative_to(ROOT)) for file in LAUNCHERS]
    assert len(files) == len(LAUNCHERS) + 2 == 11
    for options in (["--external-sources", first, *files[-2:]], ["--exclude=SC1091", *named]):
        command = [str(BIN / "shellcheck"), *options]
        result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout
    for file in files:
        assert subprocess.run(["bash", "-n", file], check=False, cwd=ROOT).returncode == 0
        code = re.sub(r"^\s*#.*|  #.*", "", (ROOT / file).read_text(), flags=re.MULTILINE)
        # nothing by name, nothing to every interface
        assert not re.search(r"ray stop|killall|0\.0\.0\.0|pkill", code)


def test_ray_gets_the_ports_that_the_preflight_knows(dry_run):
    shown = commands(dry_run("examples/grpo/grpo_trainer_qwen25_7b_8npu.sh", "--dry-run"))
    (ray,) = (command for command in shown if command[:2] == ["ray", "start"])
    ports = [re.fullmatch(r"--(?:min-worker-|max-worker-)?port=(\d+)", word) for word in ray]
    known = {int(port[1]) for port in ports if port}
    assert len(known) == 3 and known < ports_of_ray({})


def test_dry_runs_are_those_that_are_kept(dry_run):
    """Every block of tests/dry_runs.md; all launchers are among them, and docs/ascend.md shows
    one.
    """
    block = r"^```\n(\$ ((?:\w+=\S+ )*)bash (examples/grpo/(\S+) .*--dry-run.*)\n((?:.*\n)*?))```$"
    kept = re.findall(block, DRY_RUNS.read_text(), re.MULTILINE)
    assert {script for *_, script, _ in kept} == {launcher.name for launcher in LAUNCHERS}
    for _, variables, command, _, output in kept:
        assert dry_run(*variables.split(), *shlex.split(command)).stdout == output, command
    shown = re.findall(block, (ROOT / "docs" / "ascend.md").read_text(), re.MULTILINE)
    assert len(shown) == 1 and set(shown) <= set(kept)


def test_variants_and_overrides(machine):
    script = FOLDER / "grpo_trainer_qwen3_30b_a3b_16npu.sh"
    variant = "grpo_qwen3_30b_a3b_gsm8k_16npu_tp4_ep4"
    variables = {"CONFIG": variant, "TRUST_REMOTE_CODE": "true"}
    trusting = "generate_config.trust_remote_code=true"
    joining = {**machine, "RAY_ADDRESS": "10.0.0.9:6379"}
    by_option = launch(joining, script, "--config-name", variant, "--dry-run", trusting)
    by_variable = launch({**joining, **variables}, script, "--dry-run")
    assert by_variable.stdout == by_option.stdout
    assert launch(joining, ANY, variant, "--dry-run", trusting).stdout == by_option.stdout
    assert variant in by_option.stdout and "-tp4-pp1-ep4" in by_option.stdout
    shown = commands(by_variable)
    assert shown[-1][-1] == trusting
    assert not any(command[0] == "ray" or "--own-ray" in command for command in shown)
    for argument, said in (
        ("--dryrun", "unknown option --dryrun"),
        ("aqn", "neither an option nor an override"),
        ("actor_config.lrr=1", "actor_config.lrr"),
    ):
        assert said in refused(machine, script, argument)


def refused(machine, script, *arguments):
    """What a launcher says that stops before it does or shows anything, without a word of bash's or
    Python's own.
    """
    result = launch(machine, script, *arguments)
    assert result.returncode == 2 and result.stdout == "" and recorded(machine) == "", (
        arguments,
        result,
    )
    assert not re.search(r"Traceback|unbound variable|grpo_trainer\.sh: line", result.stderr), (
        result.stderr
    )
    return result.stderr


@pytest.fixture
def facts(monkeypatch):
    """examples/grpo/facts.py, which tells a launcher what its config asks for, in this process."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("facts")


CONFIG = "grpo_qwen3_30b_a3b_gsm8k_16npu"
ANY = FOLDER / "grpo_trainer.sh"
ONE_NODE = FOLDER / "grpo_trainer_qwen3_30b_a3b_16npu.sh"
TWO_NODES = FOLDER / "grpo_trainer_qwen3_30b_a3b_2x8npu.sh"
WHOLE = "must be a whole number from"


@pytest.mark.parametrize(
    "script, variables, rule",
    [
        (ONE_NODE, {"RAY_PORT": "08080"}, f"RAY_PORT=08080 {WHOLE} 1024 to 65534"),
        (ONE_NODE, {"RAY_PORT": "65535"}, f"RAY_PORT=65535 {WHOLE} 1024 to 65534"),
        (ONE_NODE, {"RAY_PORT": "a[0]"}, f"RAY_PORT=a[0] {WHOLE} 1024 to 65534"),
        (ONE_NODE, {"NODE_TIMEOUT": "0"}, f"NODE_TIMEOUT=0 {WHOLE} 1 to 999999"),
        (ONE_NODE, {"NODE_TIMEOUT": "1.5"}, f"NODE_TIMEOUT=1.5 {WHOLE} 1 to 999999"),
        (ONE_NODE, {"NNODES": "two"}, f"NNODES=two {WHOLE} 1 to"),
        (ONE_NODE, {"NODE_RANK": "5"}, "NODE_RANK=5 must be 0: this is a launch on one node"),
        (TWO_NODES, {"NODE_RANK": "2"}, f"NODE_RANK=2 {WHOLE} 0 to 1"),
        (TWO_NODES, {"NNODES": "4", "NODE_RANK": "4"}, f"NODE_RANK=4 {WHOLE} 0 to 3"),
        (TWO_NODES, {"NODE_ADDR": ""}, "set NODE_ADDR to this node's address"),
        (TWO_NODES, {"NODE_RANK": "1", "MASTER_ADDR": ""}, "set MASTER_ADDR to node 0's"),
        (ANY, {}, "which config? The first argument names one of configs/"),
        (
            TWO_NODES,
            {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.2"},
            "NODE_ADDR=10.0.0.2 is MASTER_ADDR",
        ),
        (
            TWO_NODES,
            {"NODE_RANK": "1", "RAY_ADDRESS": "ray://10.0.0.1:1"},
            "RAY_ADDRESS='ray://10.0.0.1:1' is none that",
        ),
    ],
)
def test_variables_that_cannot_be(script, variables, rule, machine):
    addresses = {"NODE_ADDR": "10.0.0.2", "MASTER_ADDR": "10.0.0.1"}
    said = refused({**machine, **addresses, **variables}, script, "--dry-run")
    assert re.match(f"(launch|error): {re.escape(rule)}", said)
    assert len(said.splitlines()) == 1


def test_ray_of_its_own_by_its_address_and_a_port_that_can_be(machine):
    own = {"RAY_ADDRESS": "local", "RAY_PORT": "65534"}
    result = launch({**machine, **own}, ONE_NODE, "--dry-run")
    assert any(command[:2] == ["ray", "start"] for command in commands(result)), result.stderr
    assert "--port=65534 --ray-client-server-port=65535" in result.stdout


REHEARSE = f"cli/train_grpo.py --config-name {CONFIG} engine=local rehearsal.enabled=true"
SECOND_NODE = "--nodes=2 --address=10.0.0.2 --master="
NUMBER_OF_NPUS = "rl_config.actor_resource.num_npus"


@pytest.mark.parametrize(
    "arguments, rule",
    [
        (f"{NUMBER_OF_NPUS}=0", "num_npus = 0: Input should be greater"),
        (f"{NUMBER_OF_NPUS}=abc", "num_npus = 'abc': Input should be a valid"),
        (f"{SECOND_NODE}10.0.0.1 {NUMBER_OF_NPUS}=15", "15 cannot be shared equally by 2 nodes"),
        ("rl_config=null", f"{NUMBER_OF_NPUS} is missing"),
        (
            "rl_config.num_cpus_for_local_task=abc",
            "rl_config.num_cpus_for_local_task = 'abc': Input should be",
        ),
        ("megatron_training.data_path=null", "megatron_training.data_path = '' must be a path"),
        (
            "megatron_training.tokenizer_name_or_path=null",
            "megatron_training.tokenizer_name_or_path is missing",
        ),
        ("task=null", "task.train_file = '' must be a path"),
        ("actor_config.load=[5]", "actor_config.load = [5]: Input should be a valid string"),
        ("engine=foo", "unknown engine 'foo'"),
        ("engine=local", f"python {REHEARSE}"),
        ("--config-name=grpo_qwen3_30b_a3b_16npu", f"did you mean '{CONFIG}'"),
        ("--config-name=grpo_tiny_moe_cpu", "are for configs of NPUs"),
        ("--nodes=2 --address=fd00::5", "NODE_ADDR=fd00::5 must be an IPv4 address"),
        ("--nodes=2 --address=127.0.0.1", "NODE_ADDR=127.0.0.1 is this machine's own"),
        (f"{SECOND_NODE}10.0.0.1:6380", "MASTER_ADDR=10.0.0.1:6380 must be an IPv4 address"),
    ],
)
def test_what_cannot_be_launched(arguments, rule, facts, monkeypatch, capsys):
    """Refused by facts.py, at which a launcher stops (test_variants_and_overrides)."""
    command = ["facts.py", "--config-name", CONFIG, *arguments.split()]
    monkeypatch.setattr(sys, "argv", command)
    assert facts.main() == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and rule in shown.err
    assert len(shown.err.splitlines()) <= 2


@pytest.mark.parametrize(
    "nodes, override, rule",
    [
        (
            "",
            "actor_config.tensor_model_parallel_size=3",
            "32 attention heads cannot be divided by",
        ),
        ("", f"{NUMBER_OF_NPUS}=24", "24 ranks cannot be divided by 16 ranks a node"),
        ("3", f"{NUMBER_OF_NPUS}=24", "global_batch_size cannot be divided by 3 nodes"),
    ],
)
def test_a_layout_that_cannot_exist_stops_first(nodes, override, rule, machine):
    said = refused({**machine, "NNODES": nodes}, ONE_NODE, override)
    assert "tools/plan_layout.py says:" in said and rule in said


def test_base_weights_are_not_converted_into_the_folder_of_another_layout(
    facts, monkeypatch, tmp_path
):
    monkeypatch.setenv("MODELS", str(tmp_path))
    tp4 = [
        "megatron_training.sequence_parallel=true",
        "actor_config.tensor_model_parallel_size=4",
        "actor_config.expert_model_parallel_size=4",
        "generate_config.infer_tensor_parallel_size=4",
        "generate_config.infer_expert_parallel_size=4",
    ]
    base = tmp_path / "Qwen3-30B-A3B-Instruct-2507-tp1-pp1-ep16"
    with pytest.raises(ConfigError) as refusal:
        facts.read(CONFIG, 1, [*tp4, f"actor_config.load={base}"])
    own = f"{tmp_path}/Qwen3-30B-A3B-Instruct-2507-tp4-pp1-ep4"
    said = str(refusal.value)
    assert "tp1-pp1-ep16 is named after another layout than the config's TP 4 PP 1 EP 4" in said
    assert said.endswith(f"set actor_config.load={own}")
    for load, told in ((own, []), ("any/name", ["actor_config.load=any/name"])):
        _, conversion = facts.read(CONFIG, 1, [*tp4, *told])
        assert load in conversion[-1]
    base.mkdir()
    (base / "latest_checkpointed_iteration.txt").touch()
    _, conversion = facts.read(CONFIG, 1, [*tp4, f"actor_config.load={base}"])
    # nothing to convert; the preflight looks at what is there
    assert conversion == []


def test_which_python(machine, tmp_path):
    """$PYTHON if it is given, else the .venv of the checkout, else `python`; `ray` is the one
    beside it.
    """
    checkout = tmp_path / "checkout"
    shutil.copytree(FOLDER, checkout / "examples" / "grpo")
    script = checkout / "examples" / "grpo" / ONE_NODE.name
    own, other = checkout / ".venv" / "bin", tmp_path / "other" / "bin"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "python").write_text(
            f'#!/usr/bin/env bash\necho "{folder} $1, ray of $(dirname "$(command -v ray)")" >> '
            '"$RECORD"; exit 2\n'
        )
        (folder / "ray").touch()
        (folder / "python").chmod(0o755)
        (folder / "ray").chmod(0o755)
    del machine["PYTHON"]
    launch(machine, script)
    launch({**machine, "PYTHON": "other/bin/python"}, script, cwd=tmp_path)
    shutil.rmtree(own)
    launch({**machine, "PATH": f"{other}:{machine['PATH']}"}, script)
    assert recorded(machine).splitlines() == [
        f"{folder} examples/grpo/facts.py, ray of {folder}" for folder in (own, other, other)
    ]
    assert (
        "there is no python3.99 here" in launch({**machine, "PYTHON": "python3.99"}, script).stderr
    )


def test_from_any_directory(machine, tmp_path):
    script = FOLDER / "grpo_trainer_qwen25_7b_8npu.sh"
    here = {**machine, "MODELS": "my models", "DATA": "d"}
    result = launch(here, script, "--dry-run", cwd=tmp_path)
    assert result.returncode == 0 and str(tmp_path / "my models" / "Qwen2.5-7B-Instruct") in next(
        words for words in commands(result) if words[0] == "env"
    )
    assert (
        launch(
            {**here, "MODELS": str(tmp_path / "my models"), "DATA": str(tmp_path / "d")},
            os.path.relpath(script, ROOT),
            "--dry-run",
        ).stdout
        == result.stdout
    )


def test_what_is_converted_already_is_not_converted_again(machine, tmp_path):
    machine |= {"MODELS": str(tmp_path / "models"), "DATA": str(tmp_path / "data")}
    gsm8k, base = tmp_path / "data" / "gsm8k", tmp_path / "models" / "Qwen2.5-7B-Instruct-tp2-pp1"
    (gsm8k / "Qwen2.5-7B-Instruct").mkdir(parents=True)
    base.mkdir(parents=True)
    last = base / "latest_checkpointed_iteration.txt"
    for file in (
        gsm8k / "train_chat.parquet",
        gsm8k / "test_chat.parquet",
        gsm8k / "Qwen2.5-7B-Instruct" / "gsm8k_train_packed_input_ids_document.bin",
        last,
    ):
        file.touch()
        shown = launch(machine, FOLDER / "grpo_trainer_qwen25_7b_8npu.sh", "--dry-run").stdout
        is_converted = re.search("tools/convert|convert_ckpt", shown)
        # something is missing still
        assert bool(is_converted) == (file != last)


@pytest.mark.skipif(any(Path("/dev").glob("davinci[0-9]*")), reason="this machine has NPUs")
def test_without_npus_it_stops_at_the_preflight(machine, tmp_path):
    (tmp_path / "bin" / "python").unlink()  # the real one
    result = launch({**machine, "MODELS": str(tmp_path)}, FOLDER / "grpo_trainer_qwen25_7b_8npu.sh")
    assert result.returncode == 1
    assert "8 NPUs are asked for, this machine has none" in result.stdout
    command = "python cli/train_grpo.py --config-name grpo_qwen25_7b_gsm8k_8npu engine=local rehearsal.enabled=true"
    assert command in result.stderr
    assert recorded(machine) == ""  # no Ray, and nothing converted, nothing trained
    programs = [command[1] for command in commands(result) if command[0] == "python"]
    assert programs == ["tools/preflight.py"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Launched(Launcher):
    """A launcher with a real Ray and a training that is played, up to where the training waits for
    GO.
    """

    def __init__(self, machine, tmp_path):
        (tmp_path / "bin" / "ray").unlink()  # the real one
        (tmp_path / "training.py").write_text(TRAINING)
        (tmp_path / "run").mkdir()
        os.mkfifo(tmp_path / "go")
        self.go, self.log = tmp_path / "go", tmp_path / "run" / "launch.log"
        llm = tmp_path / "MindSpeed-LLM"
        llm.mkdir()
        (llm / "convert_ckpt.py").touch()
        process = subprocess.Popen(
            ["bash", str(FOLDER / "grpo_trainer_qwen25_7b_8npu.sh")],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **machine,
                "TRAINING": str(tmp_path / "training.py"),
                "RUN": str(self.log.parent),
                "GO": str(self.go),
                "MINDSPEED_LLM": str(llm),
                "RAY_PORT": str(free_port()),
                "HOME": str(tmp_path),
                "JEMALLOC": "",
            },
        )
        super().__init__(process)
        self.read_until("asked b")
        self.session = int(re.search(r"--ray-process (\d+)", self.output)[1])

    def of_ray(self):
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    os.getsid(process.pid) == self.session
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found


@pytest.fixture
def launched(machine, tmp_path):
    started = Launched(machine, tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGTERM)
        started.end()
    shutil.rmtree(
        re.search(r"--temp-dir=(/tmp/qerl-ray\.\w+)", started.output)[1], ignore_errors=True
    )


def test_its_own_ray_is_private_and_stops_with_it(launched):
    processes = launched.of_ray()
    assert {"raylet", "gcs_server"} <= {process.name() for process in processes}
    listening = [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert "NPUs 8.0" in launched.output

    launched.go.write_text("7")
    # the training's own status
    assert launched.end() == 7
    assert launched.of_ray() == []
    log = launched.log.read_text().splitlines()
    assert (
        log[0] == "warming up"
        and log[1] == f"Run directory: {launched.log.parent}"
        and log[-1] == "asked b"
    )


@pytest.mark.parametrize(
    "signals, group",
    [
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, True, marks=pytest.mark.full),
        (signal.SIGINT, True),
    ],
    ids=["kill", "scheduler", "Ctrl-C"],
)
def test_stopped_from_outside(launched, signals, group):
    """The training is told once and may end in order, then Ray is stopped."""
    (os.killpg if group else os.kill)(launched.process.pid, signals)
    assert launched.end() == 128 + signals
    assert launched.log.read_text().splitlines()[-1] == "told to stop"
    assert launched.of_ray() == []


def test_a_process_of_ray_that_has_just_ended_ends_no_launcher():
    """As it is looked for Ray's folder on a node that serves."""
    script = """set -euo pipefail; source examples/grpo/processes.sh
        lives() { alive=(99999999); }; ray=1; find_logs; echo on"""
    assert subprocess.check_output(["bash", "-c", script], cwd=ROOT) == b"on\n"


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("wait_for_npus")


@pytest.mark.parametrize(
    "nodes, said",
    [
        ("0:8 1:8 2:8", []),
        (
            "0:8 1:6 2:16",
            ["10.0.0.2 (NODE_RANK 1) has 6 of 8", "10.0.0.3 (NODE_RANK 2) has 16 of 8"],
        ),
        (
            "0:8",
            [
                "1 of 3 nodes are there (10.0.0.1 (NODE_RANK 0)): ",
                "others with NODE_RANK=1 and 2 M",
            ],
        ),
        (
            "0:8 1:8 1:8",
            ["10.0.0.3 (NODE_RANK 1) is one too many of 3", "other with NODE_RANK=2 M"],
        ),
        ("0:8 1:8 2:8 3:8", ["10.0.0.4 (NODE_RANK 3) is one too many of 3"]),
        ("", ["nobody answers at 10.0.0.1:6380"]),
    ],
)
def test_missing_nodes_are_named(nodes, said, waiting):
    there = [
        waiting.Node(int(rank), f"10.0.0.{number}", int(npus), 1)
        for number, (rank, _, npus) in enumerate((each.partition(":") for each in nodes.split()), 1)
    ]
    words = waiting.missing(there, 3, 8, "10.0.0.1:6380")
    assert all(each in words for each in said) and bool(words) == bool(said), words


@pytest.mark.parametrize(
    "seen, status, words",
    [
        (["1"], 1, "1 of 2 nodes are in Ray\n"),
        (["12", "12", "1"], 4, "the node at 10.0.0.2 (NODE_RANK 1) has left Ray"),
        # 3: the second node, which does not answer
        (["12", "13", "13", "1"], 4, "10.0.0.2 (NODE_RANK 1) does not answer since 15 s"),
        (["12", "13", "13", "12", "1"], 4, "10.0.0.2 (NODE_RANK 1) answers again"),
    ],
    ids=["not there", "left", "silent", "back"],
)
def test_the_nodes_are_watched_until_one_is_gone(seen, status, words, waiting, monkeypatch, capfd):
    """Every ten seconds."""
    looks, silent = iter(seen), []

    def joined(_):
        look = next(looks)
        silent[:] = ["10.0.0.2"] * look.count("3")
        return [waiting.Node(rank, f"10.0.0.{rank + 1}", 8, 1) for rank in range(len(look))]

    monkeypatch.setattr(waiting, "joined", joined)
    monkeypatch.setattr(waiting, "reaches", lambda address, _: address not in silent)
    monkeypatch.setattr(waiting.time, "sleep", lambda _: None)
    monkeypatch.setattr(waiting.time, "monotonic", partial(next, count(step=10)))
    assert waiting.watch("10.0.0.1:6380", 2) == status
    assert words in "".join(capfd.readouterr())
    assert list(looks) == []
