"""A Recipe goes back to a config that reads as the same Recipe; random mutations end in a Recipe or
in words.
"""

from dataclasses import fields, replace

import pytest

from mindspeed_qerl.engines import ENGINES
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read, read_recipe
from mindspeed_qerl.recipe.types import PARTS
from mindspeed_qerl.recipe.writer import to_config
from tests.recipe.mutations import NAMES, run


def parts(recipe):
    """The typed parts, but for what Megatron is told by other keys than the Recipe's."""
    return {name: getattr(recipe, name) for name in PARTS if name != "model"} | {
        "path": recipe.model.path,
        "dtype": recipe.model.dtype,
    }


@pytest.mark.parametrize("name", NAMES)
def test_back_and_forth(name):
    recipe = read_recipe(compose(name))
    again = read_recipe(to_config(recipe))
    assert parts(again) == parts(recipe)
    assert to_config(again) == to_config(recipe)


def test_what_was_changed_in_the_recipe_is_what_is_written():
    recipe = read_recipe(compose("grpo_qwen3_30b_a3b_gsm8k_16npu"))
    layout = replace(recipe.layout, pp=2, num_layer_list=(20, 28), ep=8)
    changed = replace(
        recipe,
        layout=layout,
        run=replace(recipe.run, seed=7),
        task=replace(recipe.task, verifier_function=("a:b",), verifier_weight=(2.0,)),
    )
    config = to_config(changed)
    assert (
        config["actor_config"]["pipeline_model_parallel_size"] == 2
        and config["actor_config"]["expert_model_parallel_size"] == 8
    )
    assert config["actor_config"]["num_layer_list"] == "20,28"
    assert config["actor_config"]["seed"] == 7
    assert config["rl_config"]["verifier_function"] == ["a:b"] and config["rl_config"][
        "verifier_weight"
    ] == [2.0]
    assert parts(read(config)[0]) == parts(changed)
    # the recipe that it came from is unchanged
    assert recipe.model.arguments["pipeline_model_parallel_size"] == 1


def test_every_field_of_the_recipe_is_a_part_or_a_plain_value():
    from mindspeed_qerl.recipe.types import Recipe

    assert {field.name for field in fields(Recipe)} - set(PARTS) == {"engine", "upstream"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_random_mutations_end_in_a_recipe_or_in_words(name, engine):
    run(name, engine, 40)
