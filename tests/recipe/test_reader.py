"""A config that cannot work is refused in words, before anything heavy is imported."""

import copy
import json
import subprocess
import sys
from functools import cache

import pytest

from mindspeed_qerl import train
from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.engines import examine
from mindspeed_qerl.engines.noise import lost_noise
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import Found
from mindspeed_qerl.recipe.types import Batch, Optimizer, Task
from mindspeed_qerl.train import run
from tests import ROOT, checked, put
from tests.tables import cells

MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 90,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@cache
def composed(*overrides):
    return compose("grpo_tiny_moe_cpu", overrides)


@pytest.fixture
def raw(tmp_path):
    """The quickstart's config with a model directory and data files that exist."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    for split in ("train", "test"):
        (tmp_path / f"{split}_chat.parquet").write_bytes(b"")
    config = copy.deepcopy(composed())
    put(config, "megatron_training.tokenizer_name_or_path", str(tmp_path))
    for split in ("train", "test"):
        put(config, f"task.{split}_file", f"{tmp_path}/{split}_chat.parquet")
    return config


def refusal(raw, values):
    for key, value in values.items():
        put(raw, key, value)
    with pytest.raises(ConfigError) as error:
        checked(raw)
    return str(error.value)


def test_the_quickstart_says_what_it_does(raw):
    recipe, found = checked(raw)
    assert (
        recipe.layout.world,
        recipe.layout.ep,
        recipe.batch.global_batch_size,
        recipe.batch.samples_per_prompt,
    ) == (2, 2, 32, 8)
    algorithm = recipe.algorithm
    assert (
        recipe.optimizer.lr,
        algorithm.clip_low,
        algorithm.clip_high,
        algorithm.kl_coefficient,
    ) == (2e-4, 0.2, 0.28, 0.0)
    assert (recipe.lora.r, recipe.lora.alpha, len(recipe.lora.targets)) == (32, 64, 4)
    assert recipe.noise.noise_schedule(40).sigma(4) == 0.05
    assert found.unused == []


def test_what_follows_is_the_default():
    """Of a part by itself, too."""
    assert Batch(global_batch_size=8).mini_batch_size == 8
    assert Batch(8, 4).mini_batch_size == 4
    assert Task(verifier_function=("gsm8k", "format")).verifier_weight == (1.0, 1.0)


def test_multipliers_reach_the_injector(raw):
    put(raw, "aqn.multipliers", {"post_attention@0": 2, 1: 0.5})
    arguments = checked(raw)[0].noise_arguments
    assert arguments["multipliers"] == [("post_attention@0", 2.0), ("1", 0.5)]


def test_noise_that_bfloat16_cannot_hold_is_a_warning(raw, monkeypatch):
    assert lost_noise(checked(raw)[0]) == []  # float32 holds it
    put(raw, "generate_config.dtype", "bfloat16")
    put(raw, "aqn.sigma_end", 0.0001)
    (warning,) = lost_noise(checked(raw)[0])
    assert "norms of 1: 12 of 40 steps have less, from step 28" in warning
    monkeypatch.setattr(train, "read_rows", lambda file: [])
    monkeypatch.setattr(train, "check_task", lambda *_: Found())
    monkeypatch.setattr(train, "_directory", lambda *_: (None, None))
    monkeypatch.setattr(train, "_train", lambda recipe, found, *_: found.warnings)
    assert run(raw, "a") == [warning]
    put(raw, "aqn.schedule", "target")  # of what arrives of the noise
    assert lost_noise(checked(raw)[0]) == []


@pytest.mark.parametrize(
    "key, value, message",
    cells("""
aqn.multipliers ¦ {"inputt": 2} ¦ unknown AQN target 'inputt'
aqn.multipliers ¦ [2, 3] ¦ aqn.multipliers = [2, 3]: Input should be a valid dictionary
aqm ¦ {} ¦ unknown key 'aqm', did you mean 'aqn'
task.chat_template_kwargs ¦ {"x": 1} ¦ {'x': 1} with task.prompt = 'plain', which has no
megatron_training.learning_rate ¦ 1e-5 ¦ did you mean 'actor_config.lr'
beta ¦ 0.1 ¦ did you mean 'rl_config.init_kl_coef'
generate_config.temprature ¦ 1 ¦ 'generate_config.sampling_config.temperature'
aqn.targets ¦ "post_atention" ¦ unknown AQN target 'post_atention'; known: auto
aqn.sigma_start ¦ -1.0 ¦ sigma_start = -1.0 must be above 0
megatron_training.lora_target_modules ¦ ["linear_qkv", "q_proj"] ¦ \
megatron_training.lora_target_modules.1 = 'q_proj': Input should be 'linear_qkv',\u0020
megatron_training.lora_target_modules ¦ [] ¦ lora_target_modules is empty
rl_config.verifier_function ¦ ["gsm8k", "gsm8k_stric"] ¦ \
unknown verifier 'gsm8k_stric', did you mean 'gsm8k_strict'
rl_config.verifier_weight ¦ [1.0, 2.0] ¦ \
1 verifier_function and 2 verifier_weight must be lists, as long as each other
rl_config.mini_batch_size ¦ 12 ¦ \
global_batch_size = 32 prompts must be a multiple of rl_config.mini_batch_size = 12
rl_config.actor_resource.num_npus ¦ 3 ¦ \
3 ranks cannot be divided by TP 1 x EP 2 x PP 1 = 2 (ranks_fill_expert_groups:
rl_config.use_kl_in_reward ¦ true ¦ \
rl_config.use_kl_in_reward = true with rl_config.init_kl_coef = 0 takes nothing
rl_config.max_prompt_length ¦ 120 ¦ max_prompt_length = 120 plus sampling max_tokens = 24 exceeds
actor_config.tensor_model_parallel_size ¦ 4 ¦ 2 KV heads cannot be divided by TP 4
actor_config.context_parallel_size ¦ 2 ¦ \
context_parallel_size = 2 must be 1: its attention was never executed
actor_config.expert_model_parallel_size ¦ 3 ¦ 8 experts cannot be divided by TP 1 x EP 3 = 3
megatron_training.global_batch_size ¦ null ¦ global_batch_size is missing
megatron_training.num_layer_list ¦ "1,one" ¦ num_layer_list = '1,one': must be whole numbers
actor_config.lr ¦ NaN ¦ actor_config.lr = nan: Input should be a finite
task.train_file ¦ "no/such.parquet" ¦ \
task.train_file = 'no/such.parquet': no such file. Make it with
eval ¦ [1] ¦ section eval = [1] must be a mapping
megatron_training.tokenizer_name_or_path ¦ "nowhere" ¦ 'nowhere': no config.json there
rl_config ¦ 5 ¦ section rl_config = 5 must be a mapping
rl_config.actor_resource ¦ {"num_npu": 2} ¦ did you mean 'rl_config.actor_resource.num_npus'
rl_config.verifier_function ¦ [["gsm8k"]] ¦ \
rl_config.verifier_function.0 = ['gsm8k']: Input should be a valid string
aqn.targets ¦ [] ¦ targets is empty; to run without noise, use aqn=off
aqn.draws ¦ "answers" ¦ aqn.draws = 'answers': Input should be 'step', 'group' or 'answer'
eval.temperature ¦ 0.0 ¦ (greedy) needs eval.samples_per_problem = 1
actor_config.min_lr ¦ 1.0 ¦ must not be below actor_config.min_lr = 1.0
generate_config.infer_tensor_parallel_size ¦ 2 ¦ \
infer_tensor_parallel_size = 2 must be 1: the local engine has no other
"""),
)
def test_a_fault_is_named_with_the_way_out(raw, key, value, message):
    assert message in refusal(raw, {key: json.loads(value)})


def test_a_fault_says_which_rule_and_which_key(raw):
    """The preflight sorts by both; of a value that could not be read the recipe has the default."""
    for key, value in {
        "actor_config.lr": "fast",
        "rl_config.kl_penalty": "full",
        "aqn.sigma": 0.1,
        "generate_config.sampling_config.max_tokens": None,
        "model.tiny_qwen3_moe": 5,
        "rl_config.use_kl_in_reward": True,
        "rl_config.gamma": 0.9,
        "rl_config.actor_resource.num_npus": 3,
        "generate_config.max_model_len": 10**6,
        "task.test_file": "nowhere",
        "rl_config.verifier_function": ["gsm8c"],
    }.items():
        put(raw, key, value)
    recipe, found = examine(raw)
    assert recipe.optimizer.lr == Optimizer().lr
    assert {(fault.rule, fault.key) for fault in found.faults} == {
        ("value", "actor_config.lr"),
        ("value", "rl_config.kl_penalty"),
        ("unknown", "aqn.sigma"),
        ("missing", "generate_config.sampling_config.max_tokens"),
        ("value", "model.tiny_qwen3_moe"),
        ("conflict", "rl_config.use_kl_in_reward"),
        ("unsupported", "rl_config.gamma"),
        ("layout", ""),
        ("model", "generate_config.max_model_len"),
        ("file", "task.test_file"),
        ("data", "rl_config.verifier_function"),
    }


@pytest.mark.parametrize(
    "values, message",
    cells("""
{"rollout_correction.method": "sequence_tis", "algorithm.loss_mode": "cispo"} ¦ \
would undo CISPO's bound of each token
{"rollout_correction.method": "token_tis", "rollout_correction.floor": 0.3} ¦ \
floor is read by the masks and icepop, not by 'token_tis'
{"algorithm.loss_mode": "spo"} ¦ unknown loss 'spo', did you mean 'sapo'?
{"algorithm.loss_mode": "cispo", "algorithm.clip_ratio_c": 3.0} ¦ \
clip_ratio_c is read with algorithm.loss_mode = vanilla or gspo
{"algorithm.tau_pos": 1.5} ¦ \
tau_pos is read with algorithm.loss_mode = sapo, not 'vanilla': leave it out
{"rl_config.token_level_loss": true, "algorithm.loss_agg_mode": "seq-mean-token-sum"} ¦ \
leave one of them out
{"rl_config.overlong_buffer_enable": true, "rl_config.overlong_buffer": 25} ¦ \
overlong_buffer = 25 with overlong_buffer_enable must be between 1 and sampling
{"rl_config.overlong_buffer_enable": true, "rl_config.overlong_buffer": 4, \
"rl_config.rollout_max_tokens": 30} ¦ \
rollout_max_tokens = 30 with overlong_buffer_enable must be sampling max_tokens =
{"rl_config.filter_groups_enable": true, "rl_config.filter_groups_train_batch_size": 64} ¦ \
64 prompts cannot come from filter_groups_max_batches = 1 batches of
{"rl_config.filter_groups_enable": true, "rl_config.filter_groups_train_batch_size": 24} ¦ \
filter_groups_train_batch_size = 24 prompts must be a multiple of
{"aqn.enabled": true, "aqn.draws": "answer", "rl_config.n_samples_per_prompt": 5} ¦ \
repeat_every = 10 gives a draw to two answers in turn, for which n_samples_per_prompt = 5 must be even
{"aqn.enabled": true, "aqn.draws": "group", "aqn.repeat_every": 5} ¦ \
repeat_every is read with draws 'answer', not 'group': use aqn.draws=answer
{"rl_config.filter_groups_enable": true, "rl_config.filter_groups_metric": "acc"} ¦ \
rl_config.filter_groups_metric: unknown verifier of verifier_function 'acc'.
"""),
)
def test_options_that_exclude_each_other(raw, values, message):
    assert message in refusal(raw, json.loads(values))


def test_what_the_algorithm_takes_where_a_key_is_left_out(raw):
    recipe, _ = checked(raw)
    assert recipe.algorithm.loss_scale_factor == recipe.selection.rollout_max_tokens == 24
    put(raw, "rl_config.init_kl_coef", 0.1)
    assert checked(raw)[0].algorithm.loss_kl_coefficient == 0.1
    put(raw, "rl_config.use_kl_in_reward", True)
    assert checked(raw)[0].algorithm.loss_kl_coefficient == 0
    put(raw, "rl_config.filter_groups_enable", True)
    put(raw, "rl_config.filter_groups_train_batch_size", 16)
    del raw["rl_config"]["mini_batch_size"]
    assert checked(raw)[0].batch.mini_batch_size == 16


def test_all_faults_are_named_at_once(raw):
    faults = refusal(
        raw, {"actor_config.lr": -1, "rl_config.verifier_function": ["nope"], "eval.evry": 3}
    )
    assert len(faults.splitlines()) == 3


def test_the_actor_inherits_from_megatron_training_as_upstream_does(raw):
    raw["megatron_training"]["lr"] = raw["actor_config"].pop("lr") * 2
    raw["megatron_training"]["expert_model_parallel_size"] = 2  # as the actor's
    recipe, _ = checked(raw)
    assert (recipe.optimizer.lr, recipe.layout.ep) == (4e-4, 2)
    raw["megatron_training"]["expert_model_parallel_size"] = 1
    with pytest.raises(ConfigError, match="_size = 1 and actor_config.*_size = 2. Set actor"):
        checked(raw)
    del raw["megatron_training"]["expert_model_parallel_size"]
    raw["megatron_training"]["tensor_model_parallel_size"] = 4
    del raw["actor_config"]["tensor_model_parallel_size"]
    with pytest.raises(ConfigError, match="2 KV heads cannot be divided by TP 4"):
        checked(raw)


def test_upstream_keys_without_a_use_here_are_told_apart_from_misspelt_ones(raw):
    put(raw, "megatron_training.use_flash_attn", True)
    put(raw, "generate_config.gpu_memory_utilization", 0.8)
    assert set(checked(raw)[1].unused) == {
        "megatron_training.use_flash_attn",
        "generate_config.gpu_memory_utilization",
    }


def test_foreign_hardware_is_for_no_copies(raw):
    put(raw, "hardware_error.training", "gaussian")
    put(raw, "actor_config.tensor_model_parallel_size", 2)
    faults = refusal(raw, {"actor_config.expert_model_parallel_size": 1})
    assert "which would drift apart" in faults


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is an architecture of its own"),
        ({"num_experts": 7}, "7 experts cannot be divided by TP 1 x EP 2 = 2"),
        (
            {"num_experts": ..., "num_local_experts": 7},
            "7 experts cannot be divided by TP 1 x EP 2 = 2",
        ),
        ({"num_experts": "8"}, "'num_experts' expected int, got str"),
        (
            {"max_position_embeddings": 64},
            "max_model_len = 128, and max_position_embeddings = 64 in .*max_model_len=64",
        ),
        (
            {"architectures": ["Qwen3MoeForSequenceClassification"]},
            "only 'Qwen3MoeForCausalLM' is built",
        ),
        ({"moe_intermediate_size": 40}, "moe_intermediate_size = 40 must be a multiple of 32"),
        ('{"model_type": ', "is not valid JSON"),
        ("[]", "holds no JSON object"),
    ],
)
def test_a_model_that_cannot_run_here_is_refused(raw, tmp_path, change, message):
    if not isinstance(change, str):
        change = json.dumps(
            {key: value for key, value in {**MODEL, **change}.items() if value is not ...}
        )
    (tmp_path / "config.json").write_text(change)
    with pytest.raises(ConfigError, match=message):
        checked(raw)


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "mxfp4",
            {"hidden_size": 80},
            "'mxfp4': the model's hidden_size = 80 is no multiple of its blocks of 32",
        ),
        (
            "nvfp4",
            {"head_dim": 20, "num_attention_heads": 2},
            "num_attention_heads x head_dim = 40 is no multiple of",
        ),
        ("nvfp4", {"hidden_size": 96}, None),
        ("fp8", {"hidden_size": 96}, None),
        ("mxfp8", {}, None),
    ],
)
def test_blocks_of_a_format_fill_the_inputs_of_every_layer(raw, tmp_path, name, change, message):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, **change}))
    put(raw, "rollout_quantization", {"format": name})
    if message is None:
        assert checked(raw)[0].quantization.format == name
        return
    assert message in refusal(raw, {})


def test_a_model_without_experts_has_no_routes_to_replay(raw, tmp_path):
    dense = {key: value for key, value in MODEL.items() if "expert" not in key and "moe" not in key}
    put(raw, "actor_config.expert_model_parallel_size", 1)
    put(raw, "algorithm.routing_replay", "rollout")
    assert checked(raw)[0].algorithm.routing_replay == "rollout"
    (tmp_path / "config.json").write_text(
        json.dumps({**dense, "model_type": "qwen3", "intermediate_size": 64})
    )
    with pytest.raises(
        ConfigError, match="algorithm.routing_replay = 'rollout' with .* which has no experts"
    ):
        checked(raw)
    put(raw, "algorithm.routing_replay", "none")
    checked(raw)
    put(raw, "algorithm.routing_replay", "rolout")
    with pytest.raises(ConfigError, match="'rolout': Input should be 'none' or"):
        checked(raw)


def test_checks_come_before_heavy_imports():
    program = (
        "import sys; sys.argv = ['train_grpo.py', '--config-name', 'grpo_tiny_moe_cpu', "
        "'rl_config.verifier_function=[nope]']; import runpy\ntry: "
        "runpy.run_path('cli/train_grpo.py', run_name='__main__')\nexcept SystemExit as stop: "
        "assert stop.code == 2, stop.code\nheavy = {'torch', 'vllm', 'ray', 'megatron', "
        "'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "unknown verifier 'nope'" in done.stderr


def test_an_unknown_engine_is_refused_with_the_known_ones(raw, capsys):
    raw["engine"] = "lokal"
    assert run(raw, "a") == 2
    assert (
        "unknown engine 'lokal', did you mean 'local'? Known: local, mindspeed_rl"
        in capsys.readouterr().err
    )
