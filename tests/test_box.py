"""The launchers in fake boxes: the order of what they do, who owns a box, foreign scripts, and how
they end. The preflight, facts.py and the environment scripts are real; the conversions, Ray and the
training are played.
"""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fake_box import ROOT, Box, left_over, run, start, why_not
from tests.fake_box.nodes import Launcher
from tests.fake_box.prepared import prepare

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
FOLDER = ROOT / "examples" / "grpo"
SEVEN, THIRTY = (
    FOLDER / "grpo_trainer_qwen25_7b_8npu.sh",
    FOLDER / "grpo_trainer_qwen3_30b_a3b_16npu.sh",
)
TWO_NODES = FOLDER / "grpo_trainer_qwen3_30b_a3b_2x8npu.sh"
EIGHT = Box(dies=8, kind="910B3")
# In place of python: writes down what is called, plays what is not the launcher's own, and hangs
# where HANGS says.
PYTHON = f"""#!/usr/bin/env bash
echo "$*" >> "$RECORD"
if [[ -n ${{HANGS:-}} && "$*" == *"$HANGS"* ]]; then
    [[ $HANGS != convert_ckpt* ]] || {{ mkdir -p "$MODELS/Qwen2.5-7B-Instruct-tp2-pp1" && touch "$_/{{}}"; }}
    exec {sys.executable} -c "$HANG"
fi
case "$*" in
    *facts.py*)
        [[ -z ${{FACTS:-}} ]] || exec sed "s#/@MODELS@#$MODELS#g; s#/@DATA@#$DATA#g" <<< "$FACTS"
        exec {sys.executable} "$@" ;;
    *preflight.py*) [[ -n ${{NO_PREFLIGHT:-}} ]] || exec {sys.executable} "$@" ;;
    *--watch*) ${{WATCH:-sleep infinity}} ;;  # until it is ended, as the real one
    *wait_for_npus.py*) until grep -q "^ray " "$RECORD"; do :; done ;;
    *train_grpo.py*) exec bash -c "${{TRAINING:-true}}" ;;
esac
""".replace("{}", "latest_checkpointed_iteration.txt")
HANG = """
import os, signal, time
if "IGNORES" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "RUN" in os.environ:
    print("Run directory: " + os.environ["RUN"], flush=True)
print("it hangs", flush=True, file=__import__("sys").stderr)
time.sleep(1e6)
"""


@pytest.fixture(scope="module")
def facts():
    """What facts.py says of the launcher of 8 NPUs, once, where it is not what is tested."""
    return subprocess.run(
        [sys.executable, "examples/grpo/facts.py", "--config-name", "grpo_qwen25_7b_gsm8k_8npu"],
        cwd=ROOT,
        env={**os.environ, "MODELS": "/@MODELS@", "DATA": "/@DATA@"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture
def machine(tmp_path):
    """The environment of a launcher in a box: a minimal PATH, and the commands that are played."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    (fakes / "python").write_text(PYTHON)
    (fakes / "ray").write_text(
        '#!/usr/bin/env bash\necho "ray $*" >> "$RECORD"\nexec sleep infinity\n'
    )
    for fake in fakes.iterdir():
        fake.chmod(0o755)
    (tmp_path / "MindSpeed-LLM").mkdir()
    for name in ("convert_ckpt.py", "convert_ckpt_v2.py"):
        (tmp_path / "MindSpeed-LLM" / name).touch()
    (tmp_path / "record").touch()
    return {
        "PATH": f"{fakes}:/usr/bin:/bin",
        "PYTHON": str(fakes / "python"),
        "RECORD": str(tmp_path / "record"),
        "HANG": HANG,
        "MODELS": str(tmp_path / "models"),
        "DATA": str(tmp_path / "data"),
        "MINDSPEED_LLM": str(tmp_path / "MindSpeed-LLM"),
    }


@pytest.fixture
def played(machine, facts):
    """Without the preflight, and without facts.py at work."""
    return {**machine, "FACTS": facts, "NO_PREFLIGHT": "1"}


def called(machine):
    """What was called, by the names of the files, in order."""
    lines = Path(machine["RECORD"]).read_text().splitlines()
    return [re.search(r"(\w+)\.py|ray", line)[0] for line in lines]


def launch(machine, box, script, folder, *arguments):
    return run(box, ["bash", str(script), *arguments], folder / "box", machine)


# ---- healthy boxes, foreign scripts, order ----


@pytest.mark.parametrize(
    "box, script, config",
    [
        (EIGHT, SEVEN, "grpo_qwen25_7b_gsm8k_8npu"),
        (
            Box(dies=8, without=("ip",), address="10.0.0.1"),
            TWO_NODES,
            "grpo_qwen3_30b_a3b_gsm8k_2x8npu",
        ),
    ],
    ids=["8", "2x8 without ip"],
)
def test_a_healthy_box_trains(box, script, config, machine, tmp_path):
    """With the constructs of CANN's and NNAL's own set_env.sh, whose environment arrives; and no
    word of preflight.
    """
    token = tmp_path / "token"
    token.touch()
    machine |= {
        **prepare(config, tmp_path),
        "NODE_ADDR": "10.0.0.1",
        "ONE_NODE": str(int("2x8" not in config)),
        "RAY_AUTH_TOKEN_PATH": str(token),
        "TRAINING": "until ((ONE_NODE)) || grep -q -e --watch $RECORD; do :; done; "
        "echo $ATB_HOME_PATH, $ASCEND_OPP_PATH, $HCCL_SOCKET_IFNAME, $LD_PRELOAD; umask",
    }
    done = launch(machine, box, script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"│   (\S.*?)\s+│ (?:warning|failed)", done.stdout)
    assert not told, done.stdout
    interface = "lo" if "2x8" in config else ""
    assert (
        "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_0, /usr/local/Ascend/cann-8.5.0/opp, "
        f"{interface}, {tmp_path}/box/lib/libjemalloc.so.2"
    ) in done.stdout
    calls = called(machine)
    assert calls[:2] == ["facts.py", "preflight.py"] and {*calls[2:4]} == {
        "ray",
        "wait_for_npus.py",
    }  # at once
    assert sorted(calls[4:]) == [
        "train_grpo.py",
        *["wait_for_npus.py"] * ("2x8" in config),
    ]  # nodes are watched
    assert left_over(tmp_path / "box") == []
    assert all(line.startswith("preflight: ") for line in done.stderr.splitlines()), done.stderr


def test_when_nobody_watches_the_nodes_any_more_the_launcher_says_so(machine, tmp_path):
    """And the training goes on."""
    said, token = tmp_path / "said", tmp_path / "token"
    token.touch()
    machine |= {
        **prepare("grpo_qwen3_30b_a3b_gsm8k_2x8npu", tmp_path),
        "NO_PREFLIGHT": "1",
        "WATCH": "ls /nowhere",
        "NODE_ADDR": "10.0.0.1",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "SAID": str(said),
        "TRAINING": 'until grep -q "are watched no longer" $SAID; do :; done; exit 5',
    }
    with said.open("w") as output:
        launcher = start(
            Box(dies=8, address="10.0.0.1"),
            ["bash", str(TWO_NODES)],
            tmp_path / "box",
            machine,
            stdout=output,
            stderr=output,
        )
    try:
        assert launcher.wait(timeout=60) == 5
    finally:
        launcher.kill()
    assert (
        "No such file or directory, status 2): when one goes, the training may wait for it"
        in said.read_text()
    )
    assert left_over(tmp_path / "box") == []


def test_a_check_that_is_accepted(machine, facts, tmp_path):
    """The launcher goes on, and the run is told, which keeps it."""
    machine |= {**prepare("grpo_qwen25_7b_gsm8k_8npu", tmp_path), "FACTS": facts}
    box = Box(dies=8, acl=7)
    done = launch(machine, box, SEVEN, tmp_path, "--accept=CANN", "--accept", "canns-version")
    assert done.returncode == 0, done.stdout
    assert "│   CANN                      │ accepted " in done.stdout
    kept = (
        """--config-name grpo_qwen25_7b_gsm8k_8npu run.accepted_checks=["CANN","canns-version"]"""
    )
    assert Path(machine["RECORD"]).read_text().splitlines()[-1].endswith(kept)


def test_a_foreign_script_that_exits_is_named(machine, facts, tmp_path):
    script = tmp_path / "Ascend" / "cann" / "set_env.sh"
    script.parent.mkdir(parents=True)
    script.write_text("echo no such toolkit >&2; exit 3\n")
    done = launch(
        {**machine, "FACTS": facts, "ASCEND_ROOT": str(tmp_path / "Ascend")}, EIGHT, SEVEN, tmp_path
    )
    assert done.returncode == 2 and done.stderr == (
        f"no such toolkit\nlaunch: {script} ended the shell that sourced it. Look at what it says; "
        "what is sourced already is not sourced here\n"
    )


def test_nothing_is_converted_before_the_preflight_and_its_files_are_checked_after(
    machine, facts, tmp_path
):
    files = {**prepare("grpo_qwen25_7b_gsm8k_8npu", tmp_path), "FACTS": facts}
    for part in ("data/gsm8k", "models/Qwen2.5-7B-Instruct-tp2-pp1"):
        (tmp_path / part).rename(tmp_path / Path(part).name)
    sick = launch(machine | files, Box(dies=8, sick={5: "Critical"}), SEVEN, tmp_path)
    assert sick.returncode == 1 and called(machine) == ["facts.py", "preflight.py"]
    assert "It is made next, and checked" in sick.stdout
    Path(machine["RECORD"]).write_text("")
    done = launch(machine | files, EIGHT, SEVEN, tmp_path)  # conversions that write nothing
    assert called(machine) == [
        "facts.py",
        "preflight.py",
        "convert_gsm8k.py",
        "convert_gsm8k.py",
        "convert_ckpt.py",
        "preflight.py",
    ]
    assert done.returncode == 1 and "not converted yet" in " ".join(
        done.stdout.replace("│", "").split()
    )
    assert "no training was started" in done.stderr


# ---- one owner of a box ----


def test_a_box_has_one_owner(played, tmp_path):
    """Also with other ports, and as long as anything that the first one started lives; a joined Ray
    is not another.
    """
    script = f"""
        export HANGS=train_grpo RUN={tmp_path}/run; mkdir $RUN
        : > {tmp_path}/first
        bash {SEVEN} > {tmp_path}/first 2>&1 & first=$!
        tail --pid $first -f {tmp_path}/first | grep -q -m 1 'it hangs'
        unset HANGS
        told() {{
            local name=$1; shift
            "$@"; echo $name $?
        }}
        told second bash {SEVEN}
        told waited env RAY_PORT=7000 BOX_WAIT=1 bash {SEVEN}
        told joined env RAY_ADDRESS=127.0.0.1:6380 bash {SEVEN}
        kill -KILL $first; wait $first
        told third bash {SEVEN}
    """
    done = run(EIGHT, ["bash", "-c", script], tmp_path / "box", played)
    assert done.stderr.count("this box is taken") == 4
    taken = (
        rf"this box is taken \(/tmp/mindspeed_qerl.lock\): process \d+ of root on \S+, since [\d-]+ [\d:]+, "
        rf"config grpo_qwen25_7b_gsm8k_8npu, run directory {tmp_path}/run\. Two runs would train on the same "
        r"dies, whatever RAY_PORT is\. Stop that one \(kill \d+\), or wait for it with BOX_WAIT=SECONDS"
    )
    assert re.search(rf"^launch: {taken}$", done.stderr, re.MULTILINE), done.stderr
    assert re.search(rf"^launch: after 1 s: {taken}$", done.stderr, re.MULTILINE)
    gone = re.search(
        r"its launcher has gone \(process .*\), and what it started still runs\. If that is nobody's any "
        r"more: kill (\d+) (\d+)$",
        done.stderr,
        re.MULTILINE,
    )
    assert gone, done.stderr
    assert re.findall(r"^\w+ \d$", done.stdout, re.MULTILINE) == [
        "second 1",
        "waited 1",
        "joined 1",
        "third 1",
    ]


def test_the_lock_goes_with_its_owner(played, tmp_path):
    """A second launch after the first has ended; BOX_LOCK names another file."""
    script = f"""
        bash {SEVEN} && bash {SEVEN} && BOX_LOCK={tmp_path}/lock bash {SEVEN} && cat {tmp_path}/lock
        BOX_LOCK=/proc/lock bash {SEVEN}
    """
    done = run(EIGHT, ["bash", "-c", script], tmp_path / "box", played)
    assert called(played).count("train_grpo.py") == 3, done.stderr
    assert (
        "process " in done.stdout
        and done.returncode == 2
        and "BOX_LOCK=/proc/lock cannot be made" in done.stderr
    )


def test_those_who_join_a_ray_share_a_box_with_each_other_only(machine, facts, tmp_path):
    script = f"""
        (umask 0; : > /tmp/mindspeed_qerl.lock); exec 9< /tmp/mindspeed_qerl.lock; flock --shared 9
        RAY_ADDRESS=127.0.0.1:6399 bash {SEVEN}
        bash {SEVEN}
    """
    done = run(EIGHT, ["bash", "-c", script], tmp_path / "box", {**machine, "FACTS": facts})
    joined, other = done.stderr.splitlines()
    assert joined.startswith("launch: nobody answers at RAY_ADDRESS=127.0.0.1:6399")
    assert other.startswith(
        "launch: this box is taken (/tmp/mindspeed_qerl.lock): its launcher has gone (process "
    )


# ---- addresses and what is missing ----


@pytest.mark.parametrize(
    "variables, box, said",
    [
        (
            {"RAY_ADDRESS": "127.0.0.1:6399"},
            EIGHT,
            "nobody answers at RAY_ADDRESS=127.0.0.1:6399: `unset RAY_ADDRESS`",
        ),
        ({}, Box(dies=8, without=("flock", "setsid")), "there is no flock on PATH="),
        ({"BOX_WAIT": "abc"}, EIGHT, "BOX_WAIT=abc must be a whole number from 0"),
    ],
)
def test_what_cannot_be_is_named(variables, box, said, machine, facts, tmp_path):
    done = launch({**machine, **variables, "FACTS": facts}, box, SEVEN, tmp_path)
    assert done.returncode in (1, 2) and done.stderr.startswith(f"launch: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_an_address_that_no_interface_has(machine, tmp_path):
    (tmp_path / "token").touch()
    machine |= {"NODE_ADDR": "10.0.0.1", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    done = launch(machine, Box(dies=8, without=("ip",)), TWO_NODES, tmp_path)
    assert done.returncode == 1 and done.stderr == (
        "launch: no network interface here has NODE_ADDR=10.0.0.1; there are lo 127.0.0.1, lo "
        "::1. Set NODE_ADDR, or SOCKET_IFNAME to an interface\n"
    )
    assert (
        "'HCCL_SOCKET_IFNAME=<interface of 10.0.0.1>'"
        in launch(machine, Box(dies=8, without=("ip",)), TWO_NODES, tmp_path, "--dry-run").stdout
    )


def test_a_jemalloc_that_cannot_be_loaded(played, tmp_path):
    """Else every command of the launch says so, and with one for other pages ends."""
    (tmp_path / "jemalloc.so").write_text("not a library")
    done = launch(
        {
            **played,
            "JEMALLOC": str(tmp_path / "jemalloc.so"),
            "TRAINING": "echo preloaded: ${LD_PRELOAD:-nothing}",
        },
        EIGHT,
        SEVEN,
        tmp_path,
    )
    (said,) = [line for line in done.stdout.splitlines() if "cannot be preloaded" in line]
    assert said.startswith(
        f"launch: {tmp_path}/jemalloc.so cannot be preloaded, and is left out (JEMALLOC names "
    )
    assert (
        done.returncode == 0 and "preloaded: nothing" in done.stdout and "ld.so" not in done.stderr
    ), done


def test_below_uv_run(played, tmp_path):
    """Ray looks for `uv run` among all parents (uv_runtime_env_hook.py)."""
    looks = (
        "from ray._private import ray_constants as it\n"
        "from ray._private.runtime_env.uv_runtime_env_hook import _get_uv_run_cmdline as found\n"
        "print('below', found()[:2], it.RAY_ENABLE_UV_RUN_RUNTIME_ENV)\n"
    )
    (tmp_path / "looks.py").write_text(looks)
    (tmp_path / "run").write_text(f"bash {SEVEN}; exit $?\n")  # bash reads its own argument
    done = run(
        EIGHT,
        ["bash", "-c", f"cd {tmp_path}; exec -a uv bash run"],
        tmp_path / "box",
        {**played, "TRAINING": f"{sys.executable} {tmp_path}/looks.py"},
    )
    assert "below ['uv', 'run'] False" in done.stdout, done


def test_in_an_empty_environment(tmp_path):
    """env -i: no PATH, no HOME."""
    done = run(
        Box(),
        ["env", "-i", "bash", "-c", f"PYTHON={sys.executable} exec bash {THIRTY} --dry-run"],
        tmp_path / "box",
        {"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(
        "cli/train_grpo.py --config-name grpo_qwen3_30b_a3b_gsm8k_16npu"
    )


# ---- how it ends ----


class Hung(Launcher):
    """A launcher that hangs at a stage, up to there. Its Ray is played."""

    def __init__(self, machine, folder, stage, **variables):
        (folder / "run").mkdir()
        self.box = folder / "box"
        environment = {**machine, "HANGS": stage, **variables}
        process = start(
            EIGHT,
            ["bash", str(SEVEN)],
            self.box,
            environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        super().__init__(process)
        self.read_until("it hangs")

    def script(self):
        """The launcher's own process."""
        return next(
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if process.cmdline()[:2] == ["bash", str(SEVEN)]
        )

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)


@pytest.fixture
def hung(played, tmp_path):
    started = []

    def hang(*arguments, **variables):
        started.append(Hung(played, tmp_path, *arguments, **variables))
        return started[0]

    yield hang
    if started and started[0].process.poll() is None:
        started[0].process.kill()
        started[0].process.wait()


@pytest.mark.parametrize(
    "stage, words",
    [
        ("facts.py", "the config is read"),
        ("preflight.py", "the preflight runs"),
        ("convert_gsm8k.py", "the data is converted"),
        ("convert_ckpt.py", "the base weights are converted"),
        ("wait_for_npus.py", "Ray starts, and its NPUs are waited for"),
    ],
)
def test_ctrl_c_at_every_stage(stage, words, hung, machine):
    launcher = hung(stage)
    launcher.interrupt()
    assert launcher.end() == 130
    after = launcher.output.partition("it hangs\n")[2].splitlines()
    assert (
        after[0]
        == f"launch: Ctrl-C while {words}: waiting for it to end, at most 10 s; a second Ctrl-C "
        "kills it"
    )
    assert all(
        line.startswith(("+ kill ", "launch: Ray's logs are left in")) for line in after[1:]
    ), after
    assert left_over(launcher.box) == []
    # it is not whole
    assert not list(Path(machine["MODELS"]).rglob("latest_checkpointed_iteration.txt"))


@pytest.mark.parametrize(
    "stage, number, words",
    [
        ("preflight.py", signal.SIGTERM, "SIGTERM while the preflight runs: waiting for it to end"),
        ("train_grpo.py", signal.SIGHUP, "SIGHUP while the training runs: waiting for it to end"),
    ],
)
def test_signals_to_the_launcher_alone(stage, number, words, hung):
    launcher = hung(stage)
    launcher.script().send_signal(number)
    assert launcher.end() == 128 + number and left_over(launcher.box) == []
    assert f"launch: {words}" in launcher.output


@pytest.mark.parametrize("what", ["Ctrl-C", "closed"])
def test_a_real_terminal(what, played, tmp_path):
    """^C typed in it goes to its foreground processes, the training is none; or it goes away, and
    whoever prints gets an error: the run's log has the training's last words all the same.
    """
    (tmp_path / "run").mkdir()
    variables = {
        **played,
        "TRAINING": (
            f"trap 'echo told to stop; kill $!; exit 1' TERM; echo Run directory: {tmp_path}/run; "
            "echo it hangs; tail -f /dev/null & wait"
        ),
    }
    screen, terminal = pty.openpty()
    # a session whose terminal it is
    launcher = start(
        EIGHT,
        [*"setsid --ctty --wait bash".split(), str(SEVEN)],
        tmp_path / "box",
        variables,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    while b"it hangs" not in output:
        output += os.read(screen, 1000)
    if what == "Ctrl-C":
        os.write(screen, b"\x03")
        try:
            while more := os.read(screen, 1000):
                output += more
        except OSError:  # the last one has closed it
            pass
    os.close(screen)
    assert launcher.wait(timeout=60) == {"Ctrl-C": 130, "closed": 129}[what], output
    assert left_over(tmp_path / "box") == []
    assert (tmp_path / "run" / "launch.log").read_text().splitlines()[1:] == [
        "it hangs",
        "told to stop",
    ]
    if what == "Ctrl-C":
        assert (
            "launch: Ctrl-C while the training runs: waiting for it to end, at most 60 s; a second "
            "Ctrl-C kills it\r\n"
        ) in output.decode()


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_training_that_ignores_being_told_is_killed_at_the_second_ctrl_c(
    checkpoint, hung, tmp_path
):
    run = tmp_path / "run"
    launcher = hung("train_grpo.py", IGNORES="", RUN=str(run))
    if checkpoint:
        (run / "checkpoints" / "iter_0000020").mkdir(parents=True)
    launcher.interrupt()
    launcher.read_until(
        "launch: Ctrl-C while the training runs: waiting for it to end, at most 60 s; a second "
        "Ctrl-C kills it"
    )
    launcher.interrupt()
    assert launcher.end() == 130 and left_over(launcher.box) == []
    assert (
        "launch: the training has not ended: killed at the second Ctrl-C\n+ kill "
        in launcher.output
    )
    assert (
        "launch: to go on after iter_0000020, the last checkpoint: the same command with "
        f"run.resume='{run}'"
        if checkpoint
        else f"launch: {run} has no checkpoint yet"
    ) in launcher.output


def test_it_is_killed_after_the_stated_time(hung):
    launcher = hung("train_grpo.py", IGNORES="", STOP_TIMEOUT="1")
    launcher.interrupt()
    assert launcher.end() == 130 and left_over(launcher.box) == []
    assert (
        "at most 1 s" in launcher.output
        and "the training has not ended: killed after 1 s" in launcher.output
    )
