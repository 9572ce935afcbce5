"""Shim until the table lands."""
from mindspeed_qerl.recipe.upstream_keys import GENERATE_KEYS, MEGATRON_KEYS, RL_KEYS, SAMPLING_KEYS


def known(section):
    return sorted({"megatron": MEGATRON_KEYS, "rl_config": RL_KEYS, "generate_config": GENERATE_KEYS, "sampling_config": SAMPLING_KEYS}[section])


def check(raw, engine):
    return [], []
