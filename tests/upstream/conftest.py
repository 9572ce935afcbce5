"""Tests on the real upstream: they need its checkouts (UPSTREAM names the folder) and the
environment of `make upstream-env`.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # rehearsal.py, checkpoints.py

CHECKOUTS = ("MindSpeed-RL", "MindSpeed-LLM", "MindSpeed", "Megatron-LM", "vllm-ascend")


@pytest.fixture(scope="session")
def upstream() -> Path:
    """The folder with the checkouts at the pins."""
    if "UPSTREAM" not in os.environ:
        pytest.skip("UPSTREAM is not set: name the folder that holds " + ", ".join(CHECKOUTS))
    folder = Path(os.environ["UPSTREAM"]).resolve()
    if missing := [name for name in CHECKOUTS if not (folder / name).is_dir()]:
        pytest.fail(f"UPSTREAM={folder} has no {', '.join(missing)}")
    if importlib.util.find_spec("tensordict") is None:
        pytest.skip(
            "not the environment of `make upstream-env`: run these tests with `UPSTREAM=DIR make "
            "test-upstream`"
        )
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(family) -> (model folder, data folder), made once a session."""
    from rehearsal import make_data, make_model

    made = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (
                make_model(family, folder / "model"),
                make_data(folder / "model", folder / "data"),
            )
        return made[family]

    return get


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """Where served models are made, each once a session (ascend_rollout.py, make)."""
    return tmp_path_factory.mktemp("models")
