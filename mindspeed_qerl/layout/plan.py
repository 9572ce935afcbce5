"""A plan: model shape, parallel layout and batch arithmetic of one run, which the rules look at."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.families import NAMED_SHAPES, PUBLISHED, ModelShape, read_shape
from mindspeed_qerl.recipe.types import Batch, Layout, Recipe

NO_MODEL = "megatron_training.tokenizer_name_or_path = {!r}: no config.json there"
VLLM_VOCABULARY_MULTIPLE = 64  # vLLM pads the embedding to it (vocab_parallel_embedding.py:23)


@dataclass(frozen=True)
class Plan:
    """Everything the rules look at."""

    shape: ModelShape
    layout: Layout
    batch: Batch = field(default_factory=Batch)
    lora: bool = True
    share_backbone: bool = True
    padded_vocab_size: int | None = None  # rows of Megatron's embedding; None = vLLM's
    has_reference: bool = True  # log-probs of the model without adapters in each iteration
    kl_in_reward: bool = False  # whose log-probs by the policy are needed whatever the update takes

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each pipeline stage."""
        return (
            self.layout.num_layer_list
            or (self.shape.num_hidden_layers // self.layout.pp,) * self.layout.pp
        )

    @property
    def vllm_rows(self) -> int:
        """Rows of vLLM's embedding, all ranks together."""
        return -(-self.shape.vocab_size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE

    @property
    def rows(self) -> int:
        """Rows of Megatron's embedding."""
        return self.padded_vocab_size or self.vllm_rows

    @property
    def dp(self) -> int:
        """Data-parallel ranks of training; 1 where a layout that cannot be leaves none."""
        return max(self.layout.dp, 1)

    @property
    def share(self) -> int:
        """Answers of an iteration on each training rank."""
        return self.batch.answers // self.dp

    @property
    def mini_share(self) -> int:
        """Answers of an update on each training rank."""
        return min(self.batch.mini_answers, self.batch.answers) // self.dp

    @property
    def has_old_logprobs(self) -> bool:
        """True if the policy's log-probs are computed before the update: upstream does without
        where one update takes the whole batch once (grpo_trainer_hybrid.py:172).
        """
        batch = self.batch
        takes_all_once = batch.global_batch_size == batch.mini_batch_size and batch.epochs == 1
        return self.kl_in_reward or not takes_all_once

    @property
    def micro_batches(self) -> int:
        """Returns the micro-batches of an update, if all answers are as long as they may be."""
        return max(1, self.mini_share * self.batch.seq_length // self.batch.update_tokens)


def plan_of(
    recipe: Recipe, shape: ModelShape | None = None, ranks_per_node: int | None = None
) -> Plan:
    """The plan of a recipe.

    Args:
        shape: of the model that vLLM will load; None: `shape_of_model`.
        ranks_per_node: NPUs of a node; None: as the recipe says.

    Raises:
        ConfigError: the model's config.json makes no shape, or there is none.
    """
    return Plan(
        shape or shape_of_model(recipe),
        replace(recipe.layout, ranks_per_node=ranks_per_node or recipe.layout.ranks_per_node),
        recipe.batch,
        lora=bool(recipe.lora.targets),
        share_backbone=recipe.npu.share_backbone,
        padded_vocab_size=recipe.npu.padded_vocab_size,
        has_reference=recipe.algorithm.needs_reference,
        kl_in_reward=recipe.algorithm.use_kl_in_reward,
    )


def beyond_positions(plan: Plan, directory: str | Path) -> list[Fault]:
    """A fault if vLLM is asked for longer sequences than the model in `directory` has positions
    for.
    """
    longest = plan.batch.max_model_len
    most = plan.shape.max_position_embeddings
    if longest <= most:
        return []
    key = "generate_config.max_model_len"
    message = (
        f"{key} = {longest}, and max_position_embeddings = {most} in "
        f"{Path(directory, 'config.json')}: vLLM refuses it"
    )
    return [Fault("model", message, key, f"Set {key}={most} or less; prompt and answer must fit")]


def shape_of_model(recipe: Recipe) -> ModelShape:
    """The shape in the model's own config.json, which vLLM goes by; while the model is not there,
    the known one of its folder's name, or of its section's. ConfigError if there is none.
    """
    folder = Path(recipe.model.path)
    if (folder / "config.json").is_file():
        return read_shape(folder)
    named = {directory: name for name, directory in PUBLISHED.items()}
    name = named.get(folder.name, str(recipe.model.arguments.get("model")))
    if name not in NAMED_SHAPES:
        raise ConfigError(NO_MODEL.format(recipe.model.path))
    return NAMED_SHAPES[name]
