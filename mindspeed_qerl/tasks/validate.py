"""What must be there before a task's rows are read: its files, and rewards of the names it gives."""

from collections.abc import Iterable
from pathlib import Path

from mindspeed_qerl.errors import unknown
from mindspeed_qerl.recipe.types import Task
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS


def missing_files(task: Task, keys: Iterable[str], quickstart: bool = False) -> list[str]:
    """A fault for each of the `keys` of section task whose file is not there."""
    example = ", or for the quickstart `python tools/make_tiny_model.py --output models/tiny_qwen3_moe`" if quickstart else ""
    return [f"task.{key} = {getattr(task, key)!r}: no such file. Make it with `python tools/convert_gsm8k.py --input DIR_OR_HUB_NAME "
            f"--output DIR`{example}" for key in keys if not Path(getattr(task, key)).is_file()]


def unknown_verifiers(task: Task, more: Iterable[str] = ()) -> list[str]:
    """A fault for each reward that is none: neither one of ours, nor one of `more`, nor an import path module:function."""
    known = (*VERIFIERS, *more)
    return [f"rl_config.verifier_function: {unknown('verifier', name, known)}, or module:function of your own"
            for name, _ in task.verifiers if name not in known and ":" not in name]
