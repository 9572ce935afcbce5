"""The defaults that a config's gaps are filled with (families/megatron.py) against upstream's
sources.
"""

import ast
from pathlib import Path

import pytest

from mindspeed_qerl.families.megatron import MEGATRON_DEFAULTS

CONFIG = "MindSpeed-RL/mindspeed_rl/config_cls/megatron_config.py"
ARGUMENTS = (
    "Megatron-LM/megatron/training/arguments.py",
    "MindSpeed-LLM/mindspeed_llm/training/arguments.py",
    *(
        f"MindSpeed-LLM/mindspeed_llm/features_manager/{name}.py"
        for name in (
            "common/rotary",
            "moe/moe_router",
            "tokenizer/build_tokenizer",
            "transformer/transformer_block",
        )
    ),
)


@pytest.fixture(scope="module")
def handed_on(upstream: Path) -> dict[str, object]:
    """key -> value of the literal assignments in MegatronConfig.__init__."""
    classes = [
        node
        for node in ast.parse((upstream / CONFIG).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    (start,) = (
        node
        for node in classes[0].body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    return {
        node.targets[0].attr: node.value.value
        for node in start.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and isinstance(node.value, ast.Constant)
    }


@pytest.fixture(scope="module")
def declared(upstream: Path) -> dict[str, list[tuple[str, object]]]:
    """key -> (file, default) of each argparse declaration; a switch that is not given counts as
    false.
    """
    found: dict[str, list[tuple[str, object]]] = {}
    for file in ARGUMENTS:
        for node in ast.walk(ast.parse((upstream / file).read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            switch = "action" in keywords and ast.literal_eval(keywords["action"]).startswith(
                "store_"
            )
            default = keywords.get("default", ast.Constant(None))
            if isinstance(node.args[0], ast.Constant) and (
                switch or isinstance(default, ast.Constant)
            ):
                key = str(node.args[0].value).removeprefix("--").replace("-", "_")
                found.setdefault(key, []).append((file, False if switch else default.value))
    return found


@pytest.mark.parametrize("key, default", MEGATRON_DEFAULTS.items())
def test_each_default_is_upstreams(key, default, handed_on, declared):
    assert key in declared, "Megatron knows the argument"
    assert handed_on[key] == default and type(handed_on[key]) is type(default)
    # which count where the value above is None or false, and for a null in the config
    for file, other in declared[key]:
        assert other == default, (file, other)
