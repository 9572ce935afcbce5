"""The table of keys against MindSpeed-RL's own lists, defaults and code, read as text: nothing of
it is imported.
"""

import ast
import re

import pytest

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
    tree = ast.parse((upstream / "MindSpeed-RL" / "mindspeed_rl" / "config_cls" / file).read_text())
    return next(
        method
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    )


def defaults(upstream, section):
    """Key -> upstream's default, ... where it is no literal."""
    found = {}
    assignments = [
        node for node in ast.walk(initialiser(upstream, section)) if isinstance(node, ast.Assign)
    ]
    for target, value in ((node.targets[0], node.value) for node in assignments):
        if isinstance(target, ast.Attribute) and target.attr not in found:
            try:
                found[target.attr] = ast.literal_eval(value)
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


@pytest.mark.parametrize(
    "key",
    [
        "advantage_whiten",
        "num_samples_per_step",
        "tp_split_expert",
        "verifier_parallel",
        "verifier_timeout",
    ],
)
def test_a_key_that_nothing_reads(key, upstream):
    root = upstream / "MindSpeed-RL"
    files = {*(root / "cli").rglob("*.py"), *(root / "mindspeed_rl").rglob("*.py")} - {
        *root.rglob("rl_config.py")
    }
    assert len(files) > 100
    assert not [file for file in files if re.search(rf"\b{key}\b", file.read_text())]


@pytest.mark.parametrize(
    "file, words",
    [
        (
            "models/loss/grpo_actor_loss_func.py",
            ("clip_higher", "clip_ratio_low", "token_level_loss", "beta"),
        ),
        (
            "trainer/grpo_trainer_hybrid.py",
            ("kl_ctrl.update", "use_kl_in_reward", "apply_kl_penalty", "filter_groups"),
        ),
        ("workers/integrated_worker.py", ("kl_ctrl", "use_kl_in_reward")),
        ("workers/actor_hybrid_worker.py", ("kl_ctrl.update", "do_sample")),
    ],
)
def test_what_the_grpo_path_does_not_read(file, words, upstream):
    text = (upstream / "MindSpeed-RL" / "mindspeed_rl" / file).read_text()
    assert not [word for word in words if word in text]


def test_what_the_grpo_path_does_read(upstream):
    """The honoured options of the loss and the reward, where they are read."""
    root = upstream / "MindSpeed-RL" / "mindspeed_rl"
    loss = (root / "models" / "loss" / "grpo_actor_loss_func.py").read_text()
    reward = (root / "models" / "rule_verifier.py").read_text()
    assert all(
        f'meta_info["{key}"]' in loss
        for key in ("clip_ratio", "kl_ctrl", "entropy_coeff", "kl_penalty")
    )
    overlong = (
        "overlong_buffer_enable",
        "overlong_buffer",
        "overlong_buffer_penalty_factor",
        "rollout_max_tokens",
    )
    assert all(f"rl_config.{key}" in reward for key in overlong)
    for name in keys.TABLE["rl_config"]["kl_penalty"]["mindspeed_rl"].only:
        assert f'kl_penalty == "{name}"' in (root / "utils" / "compute.py").read_text()
