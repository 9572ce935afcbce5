"""verl's own functions, taken out of the installed package by name: importing it asks for packages
that are not in the lock.
"""

import ast
import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import torch

ROOT = Path(importlib.util.find_spec("verl").submodule_search_locations[0])


def functions(file, names, **globals_):
    """`names` of a file of verl's, without decorators and annotations."""
    namespace = {
        "torch": torch,
        "np": np,
        "math": math,
        "Optional": Optional,
        "Any": Any,
        "defaultdict": defaultdict,
        **globals_,
    }
    tree = ast.parse((ROOT / file).read_text())
    found = [node for node in tree.body if _name(node) in names]
    for node in found:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            node.returns = None
    exec(compile(ast.Module(found, []), file, "exec"), namespace)  # noqa: S102
    return SimpleNamespace(**{name: namespace[name] for name in names})


def _name(node):
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
    return getattr(target, "id", getattr(target, "name", None))


tensors = functions("utils/torch_functional.py", ["masked_sum", "masked_mean"])
core = functions(
    "trainer/ppo/core_algos.py",
    [
        "agg_loss",
        "compute_policy_loss_vanilla",
        "compute_policy_loss_gspo",
        "compute_policy_loss_cispo",
        "compute_policy_loss_sapo",
        "kl_penalty",
        "kl_penalty_forward",
        "compute_grpo_outcome_advantage",
        "compute_rloo_outcome_advantage",
    ],
    verl_F=tensors,
    AlgoConfig=type("AlgoConfig", (), {}),
    ActorConfig=SimpleNamespace,
)
ray_trainer = functions(
    "trainer/ppo/ray_trainer.py",
    ["apply_kl_penalty"],
    core_algos=core,
    masked_mean=tensors.masked_mean,
)
correction = functions(
    "trainer/ppo/rollout_corr_helper.py",
    [
        "compute_rollout_rejection_mask",
        "_parse_rollout_rs_thresholds",
        "SAFETY_BOUND",
        "SUPPORTED_ROLLOUT_RS_OPTIONS",
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
    ],
    verl_F=tensors,
    compute_is_metrics=lambda **_: {},
    compute_rs_metrics=lambda **_: {},
)
