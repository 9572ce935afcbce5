"""A model's config.json as transformers reads it. Torch-free.

Defaults, older and newer keys are the library's business: `resolve` asks the installed one.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mindspeed_qerl.common.errors import ConfigError

ConfigJson = Mapping[str, Any]  # its content, by key
ANSWER = "mindspeed_qerl config.json "  # before it, libraries may print
# without torch: two seconds instead of eight, and no torch_npu that waits for a driver
ASK = (
    "import sys; sys.modules['torch'] = None; from mindspeed_qerl.families import config; "
    "print(config.ANSWER + config.answer(sys.stdin.read()))"
)
PATIENCE = 120  # seconds
DTYPE = re.compile(r"b?float\d+(_\w+)?|u?int\d+|half|float|double|auto")


def resolve(config: ConfigJson) -> dict[str, Any]:
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
    """Returns what transformers makes of a config.json of a known model_type, as JSON; {"error":
    ...} if it refuses.
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
    """Returns True if this transformers is one before 5, as MindSpeed-RL's."""
    return int(version.partition(".")[0]) < 5


def unread_by_4(config: ConfigJson) -> list[str]:
    """Returns what transformers 4, and vLLM with it, does not find in a config.json that
    transformers 5 wrote: it would take a default instead.

    >>> unread_by_4({"rope_parameters": {"rope_theta": 1e6}})[0][:42]
    'rope_parameters has rope_theta = 1000000.0'
    """
    rope = config.get("rope_parameters")
    faults = []
    rope = rope if isinstance(rope, Mapping) else {}
    theta = rope.get("rope_theta")
    read = config.get("rope_theta", 10000.0)
    if theta is not None and theta != read:
        faults.append(
            f"rope_parameters has rope_theta = {theta!r}, which transformers 4 does not read; it "
            f'would take {read!r}. Write "rope_theta": {theta!r} beside rope_parameters'
        )
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = rope.get("rope_type", "default")
    if kind != "default" and config.get("rope_scaling") != scaling:
        faults.append(
            f"rope_parameters has rope_type = {kind!r}, which transformers 4 does not read. Write "
            f'"rope_scaling": {json.dumps(scaling)} beside rope_parameters'
        )
    experts = config.get("num_local_experts")
    if experts is not None and experts != config.get("num_experts"):
        faults.append(
            f"num_local_experts = {experts!r} is not read by transformers 4, which would take the "
            f'default of num_experts. Write "num_experts": {experts!r}'
        )
    return faults
