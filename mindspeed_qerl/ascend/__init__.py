"""The MindSpeed-RL engine: upstream's trainer and workers on Ascend NPUs, extended by subclassing, never edited."""

from typing import TYPE_CHECKING

from mindspeed_qerl.ascend.settings import MAY_CHANGE, data_files, rehearsed, validate, versions
from mindspeed_qerl.recipe.types import Recipe

if TYPE_CHECKING:
    from mindspeed_qerl.runs.directory import RunDirectory
    from mindspeed_qerl.runs.metrics import MetricsWriter
    from mindspeed_qerl.runs.progress import Progress

__all__ = ["MAY_CHANGE", "UPSTREAM", "data_files", "last_checkpoint", "rehearsed", "train", "validate", "versions"]

UPSTREAM = True


def train(recipe: Recipe, run: "RunDirectory", metrics: "MetricsWriter", progress: "Progress") -> None:
    """See engines.Engine; what it needs is imported here."""
    from mindspeed_qerl.ascend import engine

    engine.train(recipe, run, metrics, progress)


def last_checkpoint(recipe: Recipe) -> int:
    """See engines.Engine."""
    from mindspeed_qerl.ascend import engine

    return engine.last_checkpoint(recipe)
