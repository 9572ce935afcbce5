"""The processes of a run, when starting them fails: nothing is left behind."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.local import processes as module
from mindspeed_qerl.local.processes import WorkerError
from mindspeed_qerl.runs.directory import RunDirectory

from .conftest import raw_config, recipe_of


def failing_later(environment):
    """It raises the second time."""
    results = iter([environment(Path("/tmp"), 1)])

    def second_fails(*_):
        for result in results:
            return result
        raise OSError("no room")

    return second_fails


def of_another_class(worker):
    """Workers of a class that is not there: they raise where they are built."""
    return lambda name, cls, *places, **arguments: worker(name, "json:NoSuchClass", *places)


@pytest.mark.parametrize(
    "name, broken, error, message",
    [
        ("Worker", of_another_class(module.Worker), WorkerError, "has no attribute 'NoSuchClass'"),
        ("_environment", failing_later(module._environment), OSError, "no room"),
    ],
    ids=["in a worker that is built", "between two workers"],
)
def test_a_failure_anywhere_leaves_nothing_behind(
    monkeypatch, moe_dir, data_dir, tmp_path, name, broken, error, message
):
    raw = raw_config(moe_dir, data_dir)
    run = RunDirectory.create(tmp_path, "run", config=raw, command=["test"], seed=1, data_files={})
    directories, start = [], private_ray.start
    monkeypatch.setattr(
        private_ray,
        "start",
        lambda **options: directories.append(start(**options)) or directories[0],
    )
    monkeypatch.setattr(module, name, broken)
    children, handler = (
        set(psutil.Process().children(recursive=True)),
        signal.getsignal(signal.SIGTERM),
    )
    with (
        pytest.raises(error, match=message),
        module.launch(recipe_of(moe_dir, data_dir), run) as processes,
    ):
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        processes.wait_until_ready()
    assert len(directories) == 1 and not directories[0].exists()
    assert set(psutil.Process().children(recursive=True)) <= children
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [
        path.name for path in (run.path / "logs").iterdir() if not path.name.endswith(".log")
    ] == []


def test_a_rank_imports_no_compiler_before_it_trains():
    code = (
        "import sys\nfrom mindspeed_qerl.emulation import cuda_on_cpu\ncuda_on_cpu.install()\n"
        "import megatron.core.models.gpt.gpt_layer_specs, mindspeed_qerl.local.rank\n"
        "compilers = {'torch._inductor.compile_fx', 'torch._dynamo.convert_frame', 'transformers'}\n"
        "assert not compilers & sys.modules.keys(), compilers & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
