"""An import that fails in the driver is told with what to do."""

import sys

import pytest

from mindspeed_qerl.ascend import engine
from mindspeed_qerl.common.errors import EngineError


def test_an_import_that_fails_in_the_driver(tmp_path, monkeypatch):
    script = tmp_path / "checkout" / "cli" / "train_grpo.py"
    script.parent.mkdir(parents=True)
    script.write_text("import no_such_package.part\n")
    monkeypatch.setattr(engine, "installed", lambda: {"mindspeed_rl": tmp_path / "checkout"})
    with pytest.raises(EngineError) as caught:
        engine.load_upstream(None, None)
    assert str(caught.value) == (
        f"upstream cannot be imported by {sys.executable}: No module named 'no_such_package'. "
        "pip install no_such_package    # in the version of docs/ascend.md, Install"
    )
