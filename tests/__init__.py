"""What tests of many rooms need: the checkout, and the real GSM8K beside it."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(
    not GSM8K.is_dir(), reason="no ../shared/data/gsm8k beside the repository"
)


def put(config, key, value):
    """Set a dotted key."""
    *sections, last = key.split(".")
    for section in sections:
        config = config.setdefault(section, {})
    config[last] = value


def numbers(metrics):
    """The values of a loss's metrics, by name."""
    return {name: metric.value() for name, metric in metrics.items()}


def checked(config):
    """(Recipe, Found) of a resolved config; ConfigError with all of its faults, its engine's too."""
    from mindspeed_qerl.engines import examine

    recipe, found = examine(config)
    found.raise_faults()
    return recipe, found
