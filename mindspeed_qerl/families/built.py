"""What a config.json asks for that neither engine builds."""

from collections.abc import Mapping
from typing import Any

from .base import Family
from .config import ConfigJson, resolve

OWN_CODE = {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
# rotary positions: key -> the values that say what is built. Below 4.43 transformers wrote "type".
POSITIONS = {
    "rope_type": (None, "default", "llama3"),
    "type": (None, "default", "llama3"),
    "mrope_section": (None,),
    "partial_rotary_factor": (None, 1),
}


def not_built(config: ConfigJson, family: Family) -> list[str]:
    """Returns what a config.json asks for that neither engine computes: another activation, biases,
    a window of attention, other rotary positions, another output than a language model's, code of
    its own.

    Raises:
        ConfigError: as `resolve`.
    """
    values = resolve(config)
    # key of config.json -> the values that say what is built; None: left out. The keys are those
    # that the classes of transformers and vLLM look at.
    no = (None, False)
    built: dict[str, tuple] = {
        "hidden_act": ("silu",),
        "use_sliding_window": no,
        "mlp_bias": no,
        "bias": no,
        "rope_interleaved": no,
        "is_causal": (None, True),
        "qk_norm": (None, family.qk_norm),
        "qkv_bias": (None, family.qkv_bias),
        # Qwen2's classes have their biases whatever it says
        "attention_bias": (None, family.qkv_bias, False),
        "logit_scale": (None, 1),
        "partial_rotary_factor": (None, 1),
        "dual_chunk_attention_config": ({}, None),
        "per_layer_config": ({}, None),
    }
    faults = _unlike(values, built)
    # Qwen's classes unset a window that is not used; Llama has none, but vLLM reads the key
    if values.get("use_sliding_window") is None and values.get("sliding_window"):
        faults.append(f"sliding_window is {values['sliding_window']!r}; only None is built")
    if windows := sorted(set(values.get("layer_types") or ()) - {"full_attention"}):
        faults.append(f"layer_types has {windows[0]!r}; only 'full_attention' is built")
    for rope in (values["rope"], config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(rope, Mapping):
            faults += _unlike(rope, POSITIONS)
    first = (values.get("architectures") or [family.architecture])[0]
    if str(first).lower() != family.architecture.lower():  # vLLM knows "LLaMAForCausalLM", too
        faults.append(
            f"architectures is {values['architectures']!r}; only {family.architecture!r} is built"
        )
    code = values.get("auto_map")
    if isinstance(code, Mapping) and code.keys() & OWN_CODE:
        faults.append(
            f"auto_map names code of the model's own ({', '.join(map(str, code.values()))}), which "
            f"is not run here. Remove it if the model is a plain {family.architecture}"
        )
    return list(dict.fromkeys(faults))


def _unlike(values: Mapping[str, Any], built: Mapping[str, tuple]) -> list[str]:
    return [
        f"{key} is {values[key]!r}; only {' or '.join(map(repr, known[-2:]))} is built"
        for key, known in built.items()
        if values.get(key) not in known
    ]
