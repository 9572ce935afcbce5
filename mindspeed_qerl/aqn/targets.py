"""Which RMSNorm weights get the noise.

A norm is found by what it is, not by which library's class it is: any module with a class named
`...RMSNorm...` among its bases. QeRL's isinstance test on transformers' `Qwen2RMSNorm` never
matches in vLLM, whose class is its own `RMSNorm`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

# What each target name selects, as roles (see `role_of`). `auto` is resolved by looking at the
# model.
ROLES_OF_TARGET = {
    "block": ("input", "post_attention", "block"),
    "input": ("input",),
    "post_attention": ("post_attention",),
    "final": ("final",),
    "all": ("input", "post_attention", "block", "final"),
    "qk": ("qk",),
}
TARGET_NAMES = ("auto", *ROLES_OF_TARGET)

QK_NAMES = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
BLOCK_ROLES = {"input_layernorm": "input", "post_attention_layernorm": "post_attention"}
FINAL_NAMES = ("norm", "final_layernorm", "final_norm", "norm_f", "ln_f")


def check_targets(spec: str | Sequence[str]) -> list[str]:
    """`spec` as a list of target names and fnmatch patterns; ValueError for an item that is
    neither. Needs no model.

    A pattern is what holds one of `. * ? [`, e.g. `model.layers.0.input_layernorm` or `*.q_norm`.
    """
    items = list(spec) if isinstance(spec, Sequence) and not isinstance(spec, str) else [spec]
    for item in items:
        is_pattern = isinstance(item, str) and any(character in item for character in ".*?[")
        if item not in TARGET_NAMES and not is_pattern:
            raise ValueError(
                f"unknown AQN target {item!r}; known: {', '.join(TARGET_NAMES)}, or a pattern on "
                "module names such as '*.input_layernorm'"
            )
    return items


def check_multipliers(given: Mapping[str | int, float]) -> list[tuple[str, float]]:
    """The multipliers of sigma as (selector, factor); ValueError for one that is none. Needs no
    model.

    A selector is a layer ("3"), a range of layers that includes its ends ("0-11"), a target
    ("input", or a pattern on module names), or a target in layers ("post_attention@0-11"). Factors
    are 0 or more.
    """
    checked = []
    for selector, factor in given.items():
        target, layers = _parse_selector(str(selector))
        if check_targets(target) == ["auto"]:
            raise ValueError(
                f"AQN multiplier {selector!r}: 'auto' stands for all that is selected; scale "
                "aqn.sigma_start and sigma_end instead"
            )
        if layers is not None and not layers:
            raise ValueError(
                f"AQN multiplier {selector!r}: the range of layers is empty, write it as "
                "FIRST-LAST, such as 0-11"
            )
        if not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise ValueError(
                f"AQN multiplier {selector!r} must be a finite number >= 0, not {factor!r}"
            )
        checked.append((str(selector), float(factor)))
    return checked


def multipliers_of(
    norms: Collection[str], multipliers: Iterable[tuple[str, float]]
) -> dict[str, float]:
    """Returns what sigma is multiplied with for each of `norms`, paths in a model: the product over
    all selectors that select it. ValueError for a selector that selects none.
    """
    factors = dict.fromkeys(norms, 1.0)
    for selector, factor in multipliers:
        target, layers = _parse_selector(selector)
        is_selected = False
        for norm in norms:
            in_layers = layers is None or layer_of(norm) in layers
            if in_layers and answers_to(norm, target):
                factors[norm] *= factor
                is_selected = True
        if not is_selected:
            names = ", ".join(list(norms)[:4])
            raise ValueError(
                f"AQN multiplier {selector!r} selects none of the {len(norms)} norms that get "
                f"noise: {names}, ... Write a layer ('3'), a range ('0-11'), a target "
                f"({', '.join(ROLES_OF_TARGET)}, or a pattern), or TARGET@LAYERS"
            )
    return factors


def answers_to(norm: str, target: str) -> bool:
    """Returns True if a target's name or pattern selects the norm at path `norm`."""
    return role_of(norm) in ROLES_OF_TARGET.get(target, ()) or fnmatchcase(norm, target)


def layer_of(name: str) -> int | None:
    """Number of the block that the norm at path `name` is in: `model.layers.3.input_layernorm` ->
    3; None for the final norm.
    """
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(number[1]) if number else None


def _parse_selector(selector: str) -> tuple[str, range | None]:
    """(target, layers) of a multiplier's selector; of one without a target "*", without layers
    None.
    """
    match = re.fullmatch(r"(?:(.+)@)?(\d+)(?:-(\d+))?", selector)
    if not match:
        return selector, None
    target, first, last = match.groups()
    return target or "*", range(int(first), int(last or first) + 1)


def select_targets(
    model: "Module", targets: str | Sequence[str] = "auto", exclude: str | Sequence[str] = ()
) -> dict[str, "Module"]:
    """Finds the RMSNorms of `model` that get noise, by their paths, in the order of
    `model.named_modules()`.

    Args:
        targets: one or several of `auto` (`all` on a dense model, `post_attention` on a mixture of
            experts), `block` (every norm that is a direct child of a decoder block), `input`,
            `post_attention` (those of that name), `final` (the norm after the last block), `all`
            (`block` and `final`), `qk` (q_norm and k_norm, which nothing else but a pattern
            selects), or fnmatch patterns on module names.
        exclude: names and patterns of the same kind, taken out of the selection.

    Raises:
        ValueError: an unknown target name; a target or exclude that no norm of the model answers to
            (the message lists the norm classes that were seen); nothing left after `exclude`; a
            selected norm without a 1-D float weight parameter.
    """
    from torch.nn import Parameter

    targets = check_targets(targets)
    exclude = check_targets(exclude)
    norms = {}
    for name, module in model.named_modules():
        # vLLM's RMSNorm, transformers' Qwen2RMSNorm and kin, torch.nn.RMSNorm, subclasses
        # (AscendRMSNorm)
        if any("rmsnorm" in cls.__name__.lower() for cls in type(module).__mro__):
            norms[name] = module
    is_mixture = is_mixture_of_experts(model)
    try:
        wanted = _matching(norms, is_mixture, targets, "target")
        unwanted = _matching(norms, is_mixture, exclude, "exclude")
        selected = {name: norm for name, norm in norms.items() if name in wanted - unwanted}
        if not selected:
            raise ValueError(f"AQN targets {targets} without {exclude} leave no norm.")
    except ValueError as error:
        raise ValueError(f"{error} {_norms_seen(model)}") from None
    for name, norm in selected.items():
        weight = getattr(norm, "weight", None)
        if isinstance(weight, Parameter) and weight.dim() == 1 and weight.is_floating_point():
            continue
        raise ValueError(
            f"AQN target {name} ({type(norm).__name__}) has no 1-D float weight parameter; "
            f"add {name!r} to aqn.exclude"
        )
    return selected


def is_mixture_of_experts(model: "Module") -> bool:
    """True if some module holds experts. Judged by modules, never by names like `gate_proj`, which
    dense MLPs have too.
    """
    return any(_holds_experts(name, module) for name, module in model.named_modules())


def role_of(name: str) -> str:
    """Role of the norm at path `name`, one of input, post_attention, block, final, qk, other:
    `model.layers.3.input_layernorm` -> input, `model.norm` -> final, and so on.

    A block norm is a direct child of a numbered module; norms deeper in a block (inside attention
    or an MLP) are qk or other.
    """
    *parents, leaf = name.split(".")
    if leaf in QK_NAMES:
        return "qk"
    if parents and parents[-1].isdigit():
        return BLOCK_ROLES.get(leaf, "block")
    if leaf in FINAL_NAMES and layer_of(name) is None:
        return "final"
    return "other"


def _holds_experts(name: str, module: "Module") -> bool:
    from torch.nn import ModuleDict, ModuleList

    classes = " ".join(cls.__name__ for cls in type(module).__mro__) + " "
    if "FusedMoE" in classes:  # vLLM until 0.11, AscendFusedMoE
        return True
    # transformers 4 has a list of experts
    if isinstance(module, (ModuleList, ModuleDict)) and name.rpartition(".")[2] == "experts":
        return len(module) > 0
    # transformers 5 (Qwen3MoeExperts) and vLLM (RoutedExperts) stack the experts into weights
    # [num_experts, out, in].
    stacked = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return stacked and "Experts " in classes


def _matching(norms: Iterable[str], is_mixture: bool, items: list[str], what: str) -> set[str]:
    """The norms that `items` select; ValueError for one that selects nothing, a typo or a wrong
    model. what: a word for them.
    """
    names = set()
    for item in items:
        target = item
        if item == "auto":
            target = "post_attention" if is_mixture else "all"
        matched = {norm for norm in norms if answers_to(norm, target)}
        if not matched:
            raise ValueError(f"AQN {what} {item!r} matches no norm of this model.")
        names |= matched
    return names


def _norms_seen(model: "Module") -> str:
    """The message's second half: what norm classes the model has, and what to do."""
    examples: dict[str, str] = {}  # by class
    for name, module in model.named_modules():
        kind = type(module).__name__
        if "norm" in kind.lower():
            examples.setdefault(kind, name)
    seen = ", ".join(f"{kind} (e.g. {name})" for kind, name in examples.items())
    return (
        f"Norms seen: {seen or 'none; is this the rollout model?'}. Set aqn.targets to one of "
        f"{', '.join(TARGET_NAMES)} or to patterns on names of RMSNorms."
    )
