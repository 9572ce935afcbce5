"""The defaults that a config's gaps are filled with (families/megatron.py) against upstream's
sources.
"""

import ast
from pathlib import Path

import pytest
from test_keys import defaults

from mindspeed_qerl.families.megatron import MEGATRON_DEFAULTS

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
def declared(upstream: Path) -> dict[str, list[tuple[str, object]]]:
    """key -> (file, default) of each argparse declaration; a switch that is not given counts as
    false.
    """
    found: dict[str, list[tuple[str, object]]] = {}
    for file in ARGUMENTS:
        for node in ast.walk(ast.parse((upstream / file).read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")):
                continue
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            default = keywords.get("default", ast.Constant(None))
            if ast.unparse(keywords.get("action", default)).startswith("'store_"):
                default = ast.Constant(False)
            if isinstance(node.args[0], ast.Constant) and isinstance(default, ast.Constant):
                key = str(node.args[0].value).removeprefix("--").replace("-", "_")
                found.setdefault(key, []).append((file, default.value))
    return found


@pytest.mark.parametrize("key, default", MEGATRON_DEFAULTS.items())
def test_each_default_is_upstreams(key, default, upstream, declared):
    assert key in declared, "Megatron knows the argument"
    handed_on = defaults(upstream, "megatron")[key]
    assert handed_on == default and type(handed_on) is type(default)
    # which count where the value above is None or false, and for a null in the config
    for file, other in declared[key]:
        assert other == default, (file, other)
