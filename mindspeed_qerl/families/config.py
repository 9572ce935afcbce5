"""A model's config.json as transformers reads it, and what of it is not built here. Torch-free.

Defaults, older and newer keys are the library's business: `resolve` asks the installed one.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_qerl.common.errors import ConfigError

if TYPE_CHECKING:
    from mindspeed_qerl.families.base import Family

ANSWER = "mindspeed_qerl config.json "  # before it, libraries may print
# without torch: two seconds instead of eight, and no torch_npu that waits for a driver
ASK = (
    "import sys; sys.modules['torch'] = None; from mindspeed_qerl.families import config; "
    "print(config.ANSWER + config.answer(sys.stdin.read()))"
)
PATIENCE = 120  # seconds
DTYPE = re.compile(r"b?float\d+(_\w+)?|u?int\d+|half|float|double|auto")
OWN_CODE = {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
# rotary positions: key -> the values that say what is built. Below 4.43 transformers wrote "type".
POSITIONS = {
    "rope_type": (None, "default"),
    "type": (None, "default"),
    "mrope_section": (None,),
    "partial_rotary_factor": (None, 1),
}


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a config.json, with those that it leaves out or writes in another way, as the
    installed transformers has them; `rope` is what it makes of rope_theta, rope_scaling and
    rope_parameters.

    Raises:
        ConfigError: transformers is not installed, or refuses it.
    """
    for key in ("dtype", "torch_dtype"):
        name = config.get(key)
        if isinstance(name, str) and not DTYPE.fullmatch(name):
            raise ConfigError(f"{key} = {name!r} is no name of torch's, such as float32")
    values = json.loads(_answer_of(json.dumps(config)))
    if "error" in values:
        raise ConfigError(values["error"])
    return values


@functools.lru_cache
def _answer_of(text: str) -> str:
    if "transformers" in sys.modules:
        return answer(text)
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            input=text,
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"config.json is read by transformers, which is missing or does not start: {error}. "
            f"Try: {sys.executable} -c 'import transformers', or pip install transformers"
        ) from error
    return done.stdout.rpartition(ANSWER)[2]


def answer(text: str) -> str:
    """What transformers makes of a config.json of a known model_type, as JSON; {"error": ...} if it
    refuses.
    """
    from transformers import CONFIG_MAPPING, __version__

    given = json.loads(text)
    try:
        config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    except Exception as error:  # noqa: BLE001  of many kinds
        words = " ".join(str(error).split())
        return json.dumps({"error": f"transformers {__version__} refuses config.json: {words}"})
    values = config.to_dict() | {name: getattr(config, name, None) for name in config.attribute_map}
    if is_old(__version__):
        values["rope"] = {**(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    else:
        values["rope"] = config.rope_parameters
    return json.dumps({**values, "transformers_version": __version__}, default=str)


def is_old(version: str) -> bool:
    """Whether this transformers is one before 5, as MindSpeed-RL's."""
    return int(version.partition(".")[0]) < 5


def unread_by_4(config: Mapping[str, Any]) -> list[str]:
    """What transformers 4, and vLLM with it, does not find in a config.json that transformers 5
    wrote: it would take a default instead.

    >>> unread_by_4({"rope_parameters": {"rope_theta": 1e6}})[0][:42]
    'rope_parameters has rope_theta = 1000000.0'
    """
    rope, faults = config.get("rope_parameters"), []
    theta = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    read = config.get("rope_theta", 10000.0)
    if theta is not None and theta != read:
        faults.append(
            f"rope_parameters has rope_theta = {theta!r}, which transformers 4 does not read; it "
            f'would take {read!r}. Write "rope_theta": {theta!r} beside rope_parameters'
        )
    experts = config.get("num_local_experts")
    if experts is not None and experts != config.get("num_experts"):
        faults.append(
            f"num_local_experts = {experts!r} is not read by transformers 4, which would take the "
            f'default of num_experts. Write "num_experts": {experts!r}'
        )
    return faults


def not_built(config: Mapping[str, Any], family: "Family") -> list[str]:
    """What a config.json asks for that neither engine computes: another activation, biases, a
    window of attention, other rotary positions, another output than a language model's, code of its
    own.

    Raises:
        ConfigError: as `resolve`.
    """
    values = resolve(config)
    faults = _unlike(values, _built(family))
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
    faults = []
    for key, known in built.items():
        if values.get(key) not in known:
            faults.append(f"{key} is {values[key]!r}; only {known[-1]!r} is built")
    return faults


def _built(family: "Family") -> dict[str, tuple]:
    """Key of config.json -> the values that say what is built; None: left out. The keys are those
    that the classes of transformers and vLLM look at.
    """
    no = (None, False)
    return {
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
