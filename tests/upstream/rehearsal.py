"""Tiny models, their data, and configs for them; and a run of the real upstream on the emulated
NPU.
"""

import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from mindspeed_qerl import emulation
from mindspeed_qerl.layout import parts
from mindspeed_qerl.layout.memory import Memory
from mindspeed_qerl.runs.directory import RunDirectory
from tests.families.public_models import MODELS, narrow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKOUTS = ("MindSpeed-RL", "MindSpeed-LLM", "MindSpeed", "Megatron-LM", "vllm-ascend")
VOCABULARY = 128
LAYERS = 2
# rows without padding, as many answers in one as fit
PACKED = {
    "rl_config.use_remove_padding": True,
    "megatron_training.reset_attention_mask": True,
    "megatron_training.use_flash_attn": True,
    "rl_config.use_dynamic_bsz": True,
    "rl_config.actor_max_packing_token_size": 256,
    "rl_config.ref_max_packing_token_size": 256,
    "rl_config.update_max_packing_token_size": 256,
}

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
    bos_token_id=None,
)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
# family -> transformers config class, its arguments, and the arguments of Megatron that go with
# them
DENSE = dict(
    use_mcore_models=True,
    num_layers=LAYERS,
    hidden_size=128,
    ffn_hidden_size=192,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=32,
    max_position_embeddings=512,
    rotary_base=1000000,
    position_embedding_type="rope",
    make_vocab_size_divisible_by=1,
    padded_vocab_size=VOCABULARY,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    attention_softmax_in_fp32=True,
    no_gradient_accumulation_fusion=True,
)
MIXTURE = dict(
    DENSE,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_grouped_gemm=True,
    moe_permutation_async_comm=True,
    moe_token_dispatcher_type="alltoall_seq",
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.001,
)
FAMILIES = {
    "qwen2": ("Qwen2Config", SHAPE, dict(DENSE, add_qkv_bias=True)),
    "qwen3": ("Qwen3Config", dict(SHAPE, head_dim=32), dict(DENSE, qk_layernorm=True)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True),
        dict(MIXTURE, qk_layernorm=True, norm_topk_prob=True),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(SHAPE, **EXPERTS, shared_expert_intermediate_size=96, norm_topk_prob=False),
        dict(
            MIXTURE,
            add_qkv_bias=True,
            n_shared_experts=2,
            spec=["mindspeed_llm.tasks.models.spec.qwen2_moe_spec", "layer_spec"],
        ),
    ),
}
# Llama 3's rotary positions, which short answers reach, too
LLAMA3 = dict(low_freq_factor=1.5, high_freq_factor=4.5, original_max_position_embeddings=64)
FAMILIES["llama"] = (
    "LlamaConfig",
    dict(SHAPE, rope_scaling={"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
    dict(DENSE, rope_scaling_type="llama3", rope_scaling_factor=8.0, **LLAMA3),
)


def with_ratios(config: dict[str, Any]) -> tuple[str, dict, dict]:
    """The row of a public model's family with its heads to a KV group and to the hidden size, its
    embedding tied or not.
    """
    name, shape, arguments = FAMILIES[config["model_type"]]
    sizes = narrow(config)
    sizes.pop("rope_parameters", None)
    told = {key: sizes[key] for key in ("hidden_size", "num_attention_heads")}
    told["untie_embeddings_and_output_weights"] = not sizes["tie_word_embeddings"]
    return name, shape | sizes, arguments | told


PUBLIC = ("Qwen3-4B", "Qwen3-32B", "Qwen2.5-72B", "Llama-3.2-1B")
ROWS = FAMILIES | {name: with_ratios(MODELS[name]) for name in PUBLIC}
# aqn.targets auto
NOISY_NORMS = {
    "qwen2": 2 * LAYERS + 1,
    "qwen3": 2 * LAYERS + 1,
    "qwen3_moe": LAYERS,
    "qwen2_moe": LAYERS,
    "llama": 2 * LAYERS + 1,
}


def make_tokenizer():
    """One token a character, Qwen's chat tokens, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*string.printable, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(".|\n"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def make_model(family: str, folder: Path, **changes: Any) -> Path:
    """A random model of the family with its tokenizer, in bfloat16; `changes` to the family's
    transformers config.
    """
    import torch
    import transformers

    tokenizer = make_tokenizer()
    config_class, arguments, _ = ROWS[family]
    config = getattr(transformers, config_class)(
        **{**arguments, **changes},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.lm_head.weight.data[:10] *= (
        3  # the digits: it says numbers often, and so is sometimes right
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers makes them 0, and none could be seen to be lost
            parameter.data.normal_(std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(model: Path, folder: Path) -> Path:
    """Sums as GSM8K rows, converted by our converter: packed files for training, parquet for
    evaluation.
    """
    from mindspeed_qerl.tasks.gsm8k.convert import convert
    from mindspeed_qerl.tasks.packed import convert_packed

    raw = folder / "raw"
    raw.mkdir(parents=True)
    pairs = [
        (4, 4),
        (1, 3),
        (3, 3),
        (1, 2),
    ]  # what the random models like to say: some answers are right
    pairs += [(a, b) for a in range(4) for b in range(5) if (a, b) not in pairs]
    for split, chosen in (("train", pairs), ("test", [(a, b) for a in range(4) for b in (5, 6)])):
        rows = [
            {"question": f"{a}+{b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"} for a, b in chosen
        ]
        (raw / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(raw, folder / "chat")
    convert_packed(raw, folder / "packed", model)
    return folder


def make_config(
    family: str,
    model: Path,
    data: Path,
    runs: Path,
    *,
    npus: int = 2,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    infer_tp: int = 1,
    infer_ep: int = 1,
    train_iters: int = 3,
    samples: int = 2,
    base: Path | None = None,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole config for the engine. `changes` maps dotted keys to values; in `base` a checkpoint
    of the base weights is written for it.
    """
    mixture = "moe" in family
    config = dict(
        engine="mindspeed_rl",
        emulate_npu=True,
        model={"tiny": dict(ROWS[family][2])},
        megatron_training=dict(
            model="tiny",
            use_mcore_models=True,
            sequence_parallel=tp > 1,
            no_masked_softmax_fusion=True,
            bf16=True,
            use_distributed_optimizer=True,
            tokenizer_type="PretrainedFromHF",
            tokenizer_name_or_path=str(model),
            global_batch_size=4,
            seq_length=128,
            save_interval=1,
            train_iters=train_iters,
            stage="ray_grpo",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            distributed_backend="nccl",
            no_shared_storage=True,
            no_pad_to_seq_lengths=True,
            variable_seq_lengths=True,
            dataset_additional_keys=["labels"],
            data_path=str(data / "packed" / "gsm8k_train"),
            split="100,0,0",
            no_shuffle=True,
            full_shuffle_instruction_dataset=False,
            seed=1,
            use_rotary_position_embeddings=True,
            num_workers=0,
            lora_r=4,
            lora_alpha=8,
            lora_ckpt_filter=True,
            lora_target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        ),
        actor_config=dict(
            model="tiny",
            micro_batch_size=1,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            moe_tp_extend_ep=mixture,
            lr=1e-3,
            lr_decay_style="constant",
            min_lr=0.0,
            weight_decay=0.0,
            lr_warmup_fraction=0.0,
            clip_grad=1.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            finetune=True,
            no_load_optim=True,
            no_load_rng=True,
        ),
        rl_config=dict(
            blocking=True,
            use_integrated_worker=True,
            share_backbone=True,
            kl_ctrl_type="fixed",
            init_kl_coef=0.001,
            max_prompt_length=100,
            shuffle_mini_batch=False,
            n_samples_per_prompt=samples,
            rule_reward=True,
            log_max_throughput=False,
            num_cpus_for_placement_group=1,
            actor_resource=dict(num_npus=npus),
        ),
        generate_config=dict(
            trust_remote_code=False,
            offload_train_optimizer=True,
            offload_train_grad=True,
            offload_train_param=True,
            infer_tensor_parallel_size=infer_tp,
            infer_expert_parallel_size=infer_ep,
            enable_expert_parallel=infer_ep > 1,
            max_num_seqs=8,
            max_model_len=160,
            max_num_batched_tokens=160,
            gpu_memory_utilization=0.1,
            enforce_eager=True,
            sampling_config=dict(
                seed=1, logprobs=1, max_tokens=12, top_p=1.0, top_k=-1, min_p=0.0, detokenize=False
            ),
        ),
        aqn=dict(enabled=True, sigma_start=0.05, sigma_end=0.005, num_stages=3),
        task=dict(test_file=str(data / "chat" / "test_chat.parquet"), prompt="chat"),
        eval=dict(every=2, n_problems=6, samples_per_problem=2),
        run=dict(root=str(runs), name="rehearsal", tensorboard=False),
    )
    if base:
        from checkpoints import write_base_checkpoint

        config["actor_config"]["load"] = str(write_base_checkpoint(model, base, tp, pp, ep))
    for key, value in (changes or {}).items():
        section = config
        *parents, last = key.split(".")
        for parent in parents:
            section = section[parent]
        section[last] = value
    return config


def shrink(family: str, model: str) -> dict[str, Any]:
    """Overrides of a shipped config, to a tiny model, four ranks and short answers; nothing else of
    it changes.
    """
    shape = FAMILIES[family][2]
    recompute = {"megatron_training.recompute_num_layers": LAYERS}
    return {
        **{f"model.{model}.{key}": size for key, size in shape.items() if type(size) is int},
        **(recompute if "moe" in family else {}),
        "rl_config.actor_resource.num_npus": 4,
        "megatron_training.train_iters": 2,
        "megatron_training.global_batch_size": 8,
        "rl_config.mini_batch_size": 8,
        "rl_config.n_samples_per_prompt": 4,
        "rl_config.max_prompt_length": 100,
        "megatron_training.seq_length": 128,
        "generate_config.max_model_len": 128,
        "generate_config.max_num_batched_tokens": 128,
        "generate_config.max_num_seqs": 8,
        "generate_config.sampling_config.max_tokens": 12,
        "aqn.num_stages": 2,
        "eval.n_problems": 6,
    }


def terms(memory: Memory) -> dict[str, int]:
    """Bytes of what a rehearsal measures as well here."""
    update = {part.name: part.bytes for part in memory.moments["update"]}
    sizes = {"KV cache of a token": memory.kv_token}
    sizes |= {name: update[name] for name in ("adapters", "gradients", "AdamW", "merged weights")}
    sizes |= {"frozen base": 0, "vLLM's weights": 0}
    for part in memory.moments["weight sync"]:
        name = part.name.partition(",")[0]  # of the dense part, and of the experts
        if name in ("frozen base", "vLLM's weights"):
            sizes[name] += part.bytes
    sizes["sync buffers"] = parts.size_of(parts.sync(memory.plan, memory.stage))
    for part in memory.moments["rollout"]:
        if part.name == "int8 copies":
            sizes[part.name] = part.bytes
    return sizes


def environment(upstream: Path, *folders: Path) -> dict[str, str]:
    """This process's environment with the checkouts on PYTHONPATH, and this one, whatever is
    installed; and `folders`.
    """
    path = [*(upstream / name for name in CHECKOUTS), ROOT, *folders]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONUNBUFFERED": "1"}


def emulated(upstream: Path, npus: int = 1, *kind: str) -> dict[str, str]:
    """The environment of a program of upstream's on emulated NPUs, of that kind and CANN."""
    variables, stand_ins = environment(upstream), emulation.environment(npus, *kind)
    path = os.pathsep.join([str(emulation.STAND_INS), variables["PYTHONPATH"]])
    return {**variables, **stand_ins, "PYTHONPATH": path, "IS_MULTIMODAL": "False"}


def run_python(
    arguments: list, variables: dict[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess:
    """A Python command in `folder`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False,
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=900,
    )


def engine_command(config: dict[str, Any], folder: Path) -> list[str]:
    """Write the config below `folder`; the command that a user would start it with."""
    configs = folder / "configs"
    configs.mkdir(exist_ok=True)
    defaults = {
        "defaults": [
            "_self_",
            {"override hydra/job_logging": "disabled"},
            {"override hydra/hydra_logging": "disabled"},
        ],
        "hydra": {"output_subdir": None, "run": {"dir": "."}},
    }
    (configs / "rehearsal.yaml").write_text(yaml.safe_dump({**defaults, **config}, sort_keys=False))
    return [
        sys.executable,
        str(ROOT / "cli" / "train_grpo.py"),
        "--config-dir",
        str(configs),
        "--config-name",
        "rehearsal",
    ]


def run_engine(
    config: dict[str, Any], upstream: Path, folder: Path, *folders: Path
) -> subprocess.CompletedProcess:
    """A whole run from the command line, with `folders` on PYTHONPATH."""
    return run_python(engine_command(config, folder)[1:], environment(upstream, *folders), folder)


def run_module(
    module: str, config: dict[str, Any], upstream: Path, folder: Path, fault: str = ""
) -> subprocess.CompletedProcess:
    """A whole run with the worker of a module of this folder (drive.py), which writes into
    `folder`.
    """
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    told = {"DRIVEN_FOLDER": str(folder), "DRIVEN_FAULT": fault}
    command = [HERE / "drive.py", module, folder / "config.yaml"]
    return run_python(command, environment(upstream, HERE) | told, folder)


def finished(done: subprocess.CompletedProcess, runs: Path) -> RunDirectory:
    """The only run below `runs`, which must have ended well."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [run] = runs.iterdir()
    return RunDirectory.open(run)


def start_engine(config: dict[str, Any], upstream: Path, folder: Path) -> subprocess.Popen:
    """A run from the command line, to be read from and killed."""
    return subprocess.Popen(
        engine_command(config, folder),
        cwd=folder,
        env=environment(upstream),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
