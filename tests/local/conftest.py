"""Small directories of each model family with random weights, norms and biases included, so that no
weight can be mistaken for another.
"""

import itertools
import multiprocessing
import os
import tempfile

import numpy as np
import pytest

from tests import ROOT, checked, put
from tests.families.public_models import MODELS, narrow
from tests.upstream.rehearsal import LLAMA3
from tests.word_problems import converted

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


FAMILIES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama")
# For engines of vLLM: a dense model with norms of q and k, and one with biases, experts and shared
# experts. The others in `make test-full`: their layers are those of these, one by one.
FEW_FAMILIES = [
    family if family in ("qwen3", "qwen2_moe") else pytest.param(family, marks=pytest.mark.full)
    for family in FAMILIES
]

# dense models with the ratios of public ones, by the names of these
NARROW = {
    name: config
    for name, config in MODELS.items()
    if config["model_type"] in ("qwen2", "qwen3", "llama") and "num_key_value_heads" in config
}
ROPE = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, **LLAMA3}


def make_model(family, directory, **changes):
    import torch
    import transformers

    torch.manual_seed(7)
    shape = dict(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=family == "qwen2",
        max_position_embeddings=256,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    if family == "llama":
        shape["rope_parameters"] = ROPE
    if family.startswith("qwen3"):
        shape |= dict(head_dim=32, hidden_size=64)  # not hidden_size / heads
    if family.endswith("moe"):
        shape |= dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=family == "qwen3_moe",
        )
    if family == "qwen2_moe":
        shape |= dict(shared_expert_intermediate_size=64)
    config = transformers.AutoConfig.for_model(family, **{**shape, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        if name.endswith("bias"):
            parameter.data.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


def run_ranks(function, ranks, *args):
    """What `function(start, *args)` returns in each of as many processes; `start` makes the
    TrainRank of a recipe there. They are forked from one that has imported Megatron, which takes
    longer than most of what they do. They end at once: a spawned one tears the interpreter down
    first, and gloo's threads, still waiting for a peer, may abort it meanwhile.
    """
    import torch

    multiprocessing.set_forkserver_preload(
        [
            "mindspeed_qerl.local.rank",
            "mindspeed_qerl.local.model",
            "megatron.core.models.gpt.gpt_layer_specs",
            "megatron.core.optimizer_param_scheduler",
            "pytest",
            "peft",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            run_rank, (function, folder, args), ranks, start_method="forkserver"
        )
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def run_rank(rank, function, folder, args):
    import torch

    from mindspeed_qerl.families import read_shape
    from mindspeed_qerl.local.rank import TrainRank

    torch.set_num_threads(1)
    number = itertools.count()

    def start(recipe):
        rendezvous = f"file://{folder}/rendezvous{next(number)}"
        return TrainRank(recipe, read_shape(recipe.model.path), rank, rendezvous)

    torch.save(function(start, *args), f"{folder}/{rank}.pt")


def batch_of(prompts, answers, logprobs=None, advantages=0.0, routes=None):
    """The TrainBatch of token ids, log-probs of each of which are -1, if none are given."""
    from mindspeed_qerl.local.batch import Answer, build_batch

    logprobs = logprobs or [[-1.0] * len(answer) for answer in answers]
    columns = zip(prompts, answers, logprobs, routes or [None] * len(answers), strict=True)
    batch = build_batch([Answer(p, a, l, routes=r) for p, a, l, r in columns])
    batch.advantages[:] = advantages
    return batch


def engine_logprobs(engine, sequences, **policy):
    """log p(token t | tokens before it) by a RolloutEngine, for every token but the first of each
    sequence; policy: of a RolloutRequest.
    """
    from vllm import SamplingParams, TokensPrompt

    from mindspeed_qerl.local.rollout import RolloutRequest

    prompts = [TokensPrompt(prompt_token_ids=list(sequence)) for sequence in sequences]
    params = SamplingParams(detokenize=False, max_tokens=1, prompt_logprobs=0)
    with engine.policy(RolloutRequest(prompts, 1, 0, {}, **policy)):
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
    rows = []
    for output in outputs:
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
        rows.append([entry[token].logprob for token, entry in pairs])
    return rows


def logprobs_of(model, tokens, temperature=1.0, **arguments):
    """log p(token t | tokens before it) by a model of transformers, for every token but the first
    of each row.
    """
    logits = model(tokens, **arguments).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def furthest(found, expected):
    """The largest difference of two arrays."""
    return np.abs(np.asarray(found) - expected).max()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """Directories by family, and by the names of NARROW; made when they are asked for."""

    class Made(dict):
        def __missing__(self, name):
            config = NARROW.get(name)
            family, changes = (config["model_type"], narrow(config)) if config else (name, {})
            self[name] = make_model(family, tmp_path_factory.mktemp(family), **changes)
            return self[name]

    return Made()


@pytest.fixture(scope="session")
def expert_group():
    """vLLM makes no expert parallel group in a process whose first engine is dense, and a later
    engine with experts would fail: make one of this process alone. (A run has one engine a
    process.)
    """
    from vllm.distributed import parallel_state

    make_groups = parallel_state.initialize_model_parallel

    def make_all_groups(*args, **kwargs):
        make_groups(*args, **kwargs)
        if parallel_state._EP is None:
            parallel_state._EP = parallel_state.init_model_parallel_group(
                [[0]], 0, "gloo", group_name="ep"
            )

    parallel_state.initialize_model_parallel = make_all_groups
    yield
    parallel_state.initialize_model_parallel = make_groups


@pytest.fixture(scope="session")
def moe_dir(model_dirs):
    return model_dirs["qwen3_moe"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The quickstart's model and data, untrained."""
    from mindspeed_qerl.demo.tiny_model import ModelRecipe, make_tiny_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory, ModelRecipe(steps=0, train_problems=64, test_problems=16))
    return directory


def raw_config(model_dir, data_dir, **overrides):
    """The quickstart's config as plain dicts; overrides are dotted keys, with __ for the dot."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(ROOT / "configs"), version_base=None):
        config = compose(
            "grpo_tiny_moe_cpu",
            [
                f"megatron_training.tokenizer_name_or_path={model_dir}",
                f"task.train_file={data_dir}/train_chat.parquet",
                f"task.test_file={data_dir}/test_chat.parquet",
            ],
        )
    raw = OmegaConf.to_container(config, resolve=True)
    for key, value in overrides.items():
        put(raw, key.replace("__", "."), value)
    return raw


def recipe_of(model_dir, data_dir, **overrides):
    """The Recipe of `raw_config`."""
    return checked(raw_config(model_dir, data_dir, **overrides))[0]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("data"), 64, 16)
