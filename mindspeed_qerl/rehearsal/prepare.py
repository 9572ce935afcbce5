"""From a recipe for NPUs to the recipe of its rehearsal."""

from dataclasses import replace
from pathlib import Path

from mindspeed_qerl.ascend.limits import faults_of_plan, faults_of_values
from mindspeed_qerl.common.errors import ConfigError, Fault
from mindspeed_qerl.engines import engine_of
from mindspeed_qerl.layout.plan import Plan, plan_of
from mindspeed_qerl.recipe.reader import Found
from mindspeed_qerl.recipe.types import LORA_TARGETS, Recipe
from mindspeed_qerl.tasks import checks
from mindspeed_qerl.tasks.rows import read_rows

from .model import make_model, narrow


def prepare(recipe: Recipe, found: Found) -> Recipe:
    """The recipe that `recipe` is rehearsed with: its layout, batch arithmetic, LoRA and noise, a
    narrow model (made here, if it is not there yet), short answers, a few steps.

    Args:
        found: by the reader of `recipe`; what is wrong besides is added.

    Raises:
        ConfigError: all that is wrong with `recipe` itself: a layout that cannot exist, a misspelt
            name, missing data, what the engine of NPUs would refuse.
    """
    engine = engine_of(recipe)
    settings = recipe.rehearsal
    found.faults += faults_of_plan(recipe)
    found.faults += checks.missing_files(recipe.task, ("train_file", "test_file"))
    found.faults += faults_of_values(recipe)
    if not recipe.lora.targets:
        key = "megatron_training.lora_target_modules"
        message = f"{key} is empty. Known: {', '.join(LORA_TARGETS)}"
        found.faults.append(Fault("unsupported", message, key))
    if engine.UPSTREAM and not recipe.emulate_npu:
        message = (
            "rehearsal.enabled = true with engine = mindspeed_rl needs emulate_npu=true; or "
            "engine=local, which needs no upstream"
        )
        found.faults.append(Fault("conflict", message, "rehearsal.enabled"))
    found.raise_faults()
    plan = plan_of(recipe)
    shape = narrow(plan.shape, plan.layout, layers_to_rehearse(plan, settings.layers))
    rows = read_rows(recipe.task.train_file)
    try:
        directory = make_model(shape, rows, Path(settings.models))
    except OSError as error:
        raise ConfigError(
            f"rehearsal.models = {settings.models!r}: the narrow model cannot be written there: "
            f"{error}"
        ) from error
    small = engine.rehearsed(_small(recipe, directory), shape, rows, directory)
    if not engine.UPSTREAM:  # its own of the narrow model; upstream's were found above
        Found([*engine.validate(small)]).raise_faults()
    return small


def layers_to_rehearse(plan: Plan, layers: str) -> int:
    """The number that rehearsal.layers means: "fewest" are those that each rank needs to do what it
    will do; the layers of these models are all of one kind.
    """
    if layers == "all":
        return plan.shape.num_hidden_layers
    return plan.layout.pp


def _small(recipe: Recipe, directory: Path) -> Recipe:
    """`recipe` with the model in `directory`, few steps and short answers."""
    settings = recipe.rehearsal
    noise = recipe.noise
    layout = recipe.layout
    length = recipe.sampling.max_prompt_length + settings.max_tokens
    batched = max(length, recipe.batch.max_num_batched_tokens)
    if noise.enabled:  # the first stage has no noise: at least the last step must have some
        noise = replace(noise, num_stages=min(noise.num_stages, settings.steps))
    if settings.layers != "all":
        layout = replace(layout, num_layer_list=())
    root = Path(recipe.run.root) / "rehearsals"
    return replace(
        recipe,
        noise=noise,
        layout=layout,
        model=replace(recipe.model, path=str(directory)),
        # its chat template has no variables
        task=replace(recipe.task, chat_template_kwargs=None),
        batch=replace(
            recipe.batch, seq_length=length, max_model_len=length, max_num_batched_tokens=batched
        ),
        sampling=replace(recipe.sampling, max_tokens=settings.max_tokens),
        evaluation=replace(
            recipe.evaluation, every=settings.steps, n_problems=settings.eval_problems
        ),
        run=replace(recipe.run, train_iters=settings.steps, root=str(root)),
        rehearsal=replace(settings, enabled=False),  # what is trained is a run like any other
    )
