"""The table of keys against MindSpeed-RL's own lists, defaults and code, read as text: nothing of
it is imported.
"""

import ast
import re

import pytest

from mindspeed_qerl.ascend.contract import definitions
from mindspeed_qerl.recipe import keys

CLASSES = {
    "megatron": ("megatron_config.py", "MegatronConfig"),
    "rl_config": ("rl_config.py", "RLConfig"),
    "generate_config": ("generate_config.py", "GenerateConfig"),
}
# Upstream's defaults of these would be refused if a config set them; left out they do no harm:
# nothing obeys them.
UNREAD = {"advantage_whiten", "beta", "do_sample", "tokenizer_name_or_path", "use_mcore_models"}


def initialiser(upstream, section):
    file, name = CLASSES[section]
    folder = upstream / "MindSpeed-RL" / "mindspeed_rl" / "config_cls"
    return definitions(ast.parse((folder / file).read_text()), f"{name}.__init__")[0]


def defaults(upstream, section):
    """Key -> upstream's default, ... where it is no literal."""
    found = {}
    for node in ast.walk(initialiser(upstream, section)):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr not in found:
            try:
                found[target.attr] = ast.literal_eval(node.value)
            except ValueError:
                found[target.attr] = ...
    return found


def every_default(upstream):
    """Section -> key -> default, of all four sections."""
    found = {section: defaults(upstream, section) for section in CLASSES}
    found["megatron"]["model"] = ...  # BaseConfig.update takes it out
    sampling = found["generate_config"]["sampling_config"]
    engine = (
        upstream / "MindSpeed-RL" / "mindspeed_rl" / "models" / "rollout" / "vllm_engine.py"
    ).read_text()
    # A sampling_config replaces the whole of upstream's, so the vLLM engine decides what a key is
    # that is not there.
    gets = re.findall(r"sampling_config\.get\('(\w+)', (\S+)\)", engine)
    taken = {key: ast.literal_eval(value) for key, value in gets}
    return {**found, "sampling_config": {key: taken[key] for key in sampling}}


def test_every_key_of_upstream_is_decided_and_no_other(upstream):
    for section, found in every_default(upstream).items():
        assert len(found) >= 8 and set(found) == set(keys.TABLE[section])


def test_a_key_that_may_be_left_out_is_harmless_in_upstream(upstream):
    unread = set()
    for section, found in every_default(upstream).items():
        for key, default in found.items():
            decision = keys.TABLE[section][key]["mindspeed_rl"]
            if key == "moe_token_dispatcher_type":
                assert default is None  # then Megatron's own is taken, below
            elif decision.default is not ...:
                assert decision.default == default, key
            elif decision.only and default not in (None, *decision.only):
                unread.add(key)
    assert unread == UNREAD
    arguments = (upstream / "Megatron-LM" / "megatron" / "training" / "arguments.py").read_text()
    taken = re.search(r"'--moe-token-dispatcher-type'.*?default='(\w+)'", arguments, re.DOTALL)[1]
    assert keys.TABLE["megatron"]["moe_token_dispatcher_type"]["mindspeed_rl"].default == taken


UNREAD_KEYS = (
    "advantage_whiten",
    "num_samples_per_step",
    "tp_split_expert",
    "verifier_parallel",
    "verifier_timeout",
)


@pytest.mark.parametrize("key", UNREAD_KEYS)
def test_a_key_that_nothing_reads(key, upstream):
    root = upstream / "MindSpeed-RL"
    files = {*(root / "cli").rglob("*.py"), *(root / "mindspeed_rl").rglob("*.py")}
    files -= {*root.rglob("rl_config.py")}
    assert len(files) > 100
    assert not [file for file in files if re.search(rf"\b{key}\b", file.read_text())]


@pytest.mark.parametrize(
    "file, words, are_there",
    [
        (
            "models/loss/grpo_actor_loss_func.py",
            "clip_higher clip_ratio_low token_level_loss beta",
            False,
        ),
        (
            "trainer/grpo_trainer_hybrid.py",
            "kl_ctrl.update use_kl_in_reward apply_kl_penalty filter_groups",
            False,
        ),
        ("workers/integrated_worker.py", "kl_ctrl use_kl_in_reward", False),
        ("workers/actor_hybrid_worker.py", "kl_ctrl.update do_sample", False),
        # the honoured options of the loss and the reward, where they are read
        (
            "models/loss/grpo_actor_loss_func.py",
            '["clip_ratio"] ["kl_ctrl"] ["entropy_coeff"] ["kl_penalty"]',
            True,
        ),
        (
            "models/rule_verifier.py",
            (
                "rl_config.overlong_buffer_enable rl_config.overlong_buffer_penalty_factor "
                "rl_config.rollout_max_tokens"
            ),
            True,
        ),
    ],
)
def test_what_the_grpo_path_reads_and_does_not(file, words, are_there, upstream):
    text = (upstream / "MindSpeed-RL" / "mindspeed_rl" / file).read_text()
    assert {word in text for word in words.split()} == {are_there}
