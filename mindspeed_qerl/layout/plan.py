"""A plan: model shape, parallel layout and batch arithmetic of one run, which the rules look at."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from mindspeed_qerl.families import ModelShape, read_shape, shape_of_arguments
from mindspeed_qerl.recipe.types import Batch, Layout, Recipe


@dataclass(frozen=True)
class Plan:
    """Everything the rules look at."""

    shape: ModelShape
    layout: Layout
    batch: Batch = field(default_factory=Batch)
    lora: bool = True
    share_backbone: bool = True
    padded_vocab_size: int | None = None  # rows of Megatron's embedding; None = vLLM's

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return self.layout.num_layer_list or (self.shape.num_hidden_layers // self.layout.pp,) * self.layout.pp


def plan_of(recipe: Recipe, shape: ModelShape | None = None, ranks_per_node: int = 16) -> Plan:
    """The plan of a recipe.

    Args:
        shape: of the model that vLLM will load; None: `shape_of_model`.
        ranks_per_node: a config does not say how many NPUs a node has; upstream asks acl.

    Raises:
        ConfigError: the model's config.json, or what Megatron is told of it, makes no shape.
    """
    return Plan(shape or shape_of_model(recipe), replace(recipe.layout, ranks_per_node=ranks_per_node), recipe.batch,
                lora=bool(recipe.lora.targets), share_backbone=recipe.npu.share_backbone,
                padded_vocab_size=recipe.npu.padded_vocab_size)


def shape_of_model(recipe: Recipe) -> ModelShape:
    """The shape in the model's own config.json, which vLLM goes by; while the model is not there, what Megatron is
    told."""
    directory = Path(recipe.model.path)
    return (read_shape(directory)
            if (directory / "config.json").is_file() else shape_of_arguments(recipe.model.arguments))
