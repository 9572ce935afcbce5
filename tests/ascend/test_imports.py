"""An import that fails in a worker, or in the driver, is one line with what to do, whatever Ray
makes of it.
"""

import importlib
import os
import sys
from types import SimpleNamespace

import pytest
import ray

from mindspeed_qerl.ascend import engine, imports
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.engines import private_ray
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.runs.directory import RunDirectory

ERROR = "libop_plugin_atb.so: undefined symbol: _ZNK6AsdOps3Ops18GetOperationByNameERKSs"
OF_UPSTREAM = f"""
import os
if "IN_A_WORKER" in os.environ:
    raise ImportError("{ERROR}")
class Upstream:
    def starts(self): return 1
"""
MODULE = """
import of_upstream
class Module(of_upstream.Upstream):
    pass
"""
WORKERS = f"""
class Constructor:
    def __init__(self): raise ImportError("{ERROR}")
    def starts(self): return 1
class Task:
    def starts(self): raise ImportError("{ERROR}")
class Else:
    def starts(self): raise ValueError("no import")
"""
WAYS = ("Constructor", "Module", "Task")  # of a worker, in which its import fails


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Classes in a module that Ray's workers find, and cannot import whole."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "of_upstream.py").write_text(OF_UPSTREAM)
    (folder / "module_of_a_test.py").write_text(MODULE)
    (folder / "workers_of_a_test.py").write_text(WORKERS)
    sys.path.insert(0, str(folder))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"IN_A_WORKER": "1", "PYTHONPATH": path}
    private_ray.start(num_cpus=5, runtime_env={"env_vars": variables})
    found = importlib.import_module("workers_of_a_test")
    found.Module = importlib.import_module("module_of_a_test").Module
    yield found
    private_ray.stop()
    sys.path.remove(str(folder))


def failed(worker, tmp_path):
    """What the engine says of an upstream that starts such a worker."""
    train = SimpleNamespace(
        _function=lambda _: ray.get(ray.remote(worker).remote().starts.remote())
    )
    recipe = read_recipe(compose("grpo_qwen3_30b_a3b_gsm8k_16npu"))
    with pytest.raises(EngineError) as caught:
        engine.call_train(SimpleNamespace(train=train), recipe, RunDirectory(tmp_path))
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_an_import_that_fails_in_a_worker(way, workers, tmp_path):
    said = failed(getattr(workers, way), tmp_path)
    assert said == (
        f"a worker failed: {ERROR}. In a new shell, where python3 has torch: {imports.SOURCE} # "
        "libatb is of NNAL: another version's, or for torch's other C++ ABI; tools/preflight.py "
        f"tries it too\nEach process's output is in {tmp_path}/logs"
    )


def test_what_is_no_import_is_told_whole(workers, tmp_path):
    said = failed(workers.Else, tmp_path)
    assert "in starts" in said and "ValueError: no import" in said


def test_an_import_that_fails_in_the_driver(tmp_path, monkeypatch):
    script = tmp_path / "checkout" / "cli" / "train_grpo.py"
    script.parent.mkdir(parents=True)
    script.write_text("import no_such_package.part\n")
    monkeypatch.setattr(engine, "installed", lambda: {"mindspeed_rl": tmp_path / "checkout"})
    with pytest.raises(EngineError) as caught:
        engine.load_upstream(None, None)
    assert str(caught.value) == (
        f"upstream cannot be imported by {sys.executable}: No module named 'no_such_package'. "
        "pip install no_such_package # in the version of docs/ascend.md, Install; "
        "tools/preflight.py tries it too"
    )
