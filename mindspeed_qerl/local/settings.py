"""What the local engine reads of a config, and refuses. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.families import ModelShape, read_shape
from mindspeed_qerl.layout import rules
from mindspeed_qerl.layout.plan import Batch, Layout, Plan, layer_list
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.config import (
    AQNConfig,
    EvalConfig,
    GSM8KConfig,
    HardwareError,
    LocalConfig,
    Reader,
    RunSection,
    check_aqn,
    check_correction,
    check_hardware_error,
    check_lora_targets,
    check_names,
    check_task_sections,
    check_verifiers,
)
from mindspeed_qerl.recipe.upstream_keys import SAMPLING_KEYS
from mindspeed_qerl.runs.directory import count_rows
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS

EXPERT_WIDTH_STEP = 32  # vllm fused_moe/experts/cpu_moe.py: CPUUnquantizedExperts.output_alignment
# Of upstream's rules those that hold for any Megatron; its rollout, its nodes and its vLLM are not here.
LAYOUT_RULES = (rules.ranks_fill_training_groups, rules.ranks_fill_expert_groups, rules.heads_by_tp, rules.kv_heads_by_tp, rules.width_by_tp,
                rules.vocabulary_by_tp, rules.layers_by_pp, rules.layer_list_has_a_number_for_each_stage, rules.layer_list_sums_to_the_layers,
                rules.dense_model_without_ep, rules.experts_by_training_ranks, rules.mini_batch_by_training_dp)
DTYPES = ("float32", "bfloat16")
# A checkpoint holds whole tensors, so a run may go on in another layout, and with other buffers.
MAY_CHANGE = frozenset(
    [f"{section}.{key}" for section in ("megatron_training", "actor_config") for key in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "num_layer_list", "sequence_parallel",
        "micro_batch_size", "recompute_granularity", "recompute_method", "recompute_num_layers")]
    + ["rl_config.actor_resource.num_npus", "rl_config.ref_forward_micro_batch_size", "rl_config.actor_forward_micro_batch_size",
       "megatron_training.save_interval", "local.kv_cache_gib", "local.keep_checkpoints", "local.sync_buffer_mib"])
LR_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Sampling:
    """generate_config.sampling_config; top_p, top_k and min_p must leave the distribution whole."""

    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """What the local engine runs on. Batch sizes count prompts, micro-batch sizes answers."""

    model_dir: str
    dtype: str
    seed: int
    shape: ModelShape
    layout: Layout
    train_iters: int
    save_interval: int | None  # iterations from one checkpoint to the next; there is one after the last in any case
    global_batch_size: int
    mini_batch_size: int
    micro_batch_size: int
    ref_forward_micro_batch_size: int
    actor_forward_micro_batch_size: int
    recompute_layers: int  # of each pipeline stage, computed again for their gradient instead of kept; 0: none
    samples_per_prompt: int
    epochs: int
    max_prompt_length: int
    max_model_len: int
    max_num_seqs: int
    rollout_tp: int  # vLLM's tensor parallel size
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_warmup_steps: int
    weight_decay: float
    adam_betas: tuple[float, float]
    clip_grad: float
    clip_low: float
    clip_high: float
    kl_coefficient: float
    correction_cap: float | None  # of the importance weights of sampled tokens; None: they all count 1
    lora_r: int
    lora_alpha: float
    lora_targets: tuple[str, ...]
    verifiers: tuple[tuple[str, float], ...]
    sampling: Sampling
    aqn: AQNConfig
    hardware_error: HardwareError
    gsm8k: GSM8KConfig
    eval: EvalConfig
    run: RunSection
    local: LocalConfig
    ignored_keys: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def data_files(self) -> dict[str, str]:
        return {"train": self.gsm8k.train_file, "test": self.gsm8k.test_file, **self.aqn.data_files}


def _read_shape(reader: Reader, path: str) -> ModelShape | None:
    if not (Path(path) / "config.json").is_file():
        reader.fault(f"megatron_training.tokenizer_name_or_path = {path!r}: no config.json there. Give a Hugging Face model "
                     "directory; the quickstart's is made by `python tools/make_tiny_model.py --output models/tiny_qwen3_moe`")
        return None
    try:
        shape = read_shape(path)
    except ConfigError as error:
        reader.fault(f"megatron_training.tokenizer_name_or_path = {path!r}: {error}")
        return None
    if shape.moe and shape.moe_intermediate_size % EXPERT_WIDTH_STEP:
        reader.fault(f"{path}/config.json: moe_intermediate_size = {shape.moe_intermediate_size} must be a multiple of {EXPERT_WIDTH_STEP}; "
                     "vLLM's CPU backend pads other widths, and padded experts cannot be updated in place")
    return shape


def _read_layout(reader: Reader, get: Any) -> Layout:
    resources = get("rl_config", "actor_resource", {}, (dict,))
    for key in resources.keys() - {"num_npus"}:
        reader.fault(unknown("key in rl_config.actor_resource:", key, ["num_npus"]))
    sizes = {name: get("actor_config", f"{kind}_parallel_size", 1, low=1) for name, kind in (
        ("tp", "tensor_model"), ("pp", "pipeline_model"), ("cp", "context"), ("ep", "expert_model"))}
    if sizes["cp"] > 1:
        reader.fault(f"actor_config.context_parallel_size = {sizes['cp']}: the local engine runs it at 1 only")
    return Layout(world=reader.value("rl_config.actor_resource.num_npus", resources.get("num_npus", 1), 1, (int,), 1, None),
                  **sizes, num_layer_list=layer_list(get("megatron_training", "num_layer_list", None, (str, int)), reader),
                  sequence_parallel=get("megatron_training", "sequence_parallel", False, (bool,)))


def _check_rollout_tp(reader: Reader, shape: ModelShape, size: int) -> None:
    """Faults of sizes that vLLM's tensor parallel engines cannot share equally."""
    widths = {"num_attention_heads": (shape.num_attention_heads, 1), "num_key_value_heads": (shape.num_key_value_heads, 1)}
    if shape.moe:
        widths["moe_intermediate_size"] = (shape.moe_intermediate_size, EXPERT_WIDTH_STEP)
        if shape.shared_expert_intermediate_size:
            widths["shared_expert_intermediate_size"] = (shape.shared_expert_intermediate_size, 1)
    else:
        widths["intermediate_size"] = (shape.intermediate_size, 1)
    for name, (width, step) in widths.items():
        if width % (size * step):
            reader.fault(f"generate_config.infer_tensor_parallel_size = {size}: the model's {name} = {width} is no multiple of {size * step}"
                         + (f"; vLLM's CPU backend pads experts of other widths than multiples of {step}" if step > 1 else ""))


def check(raw: Mapping[str, Any]) -> RunConfig:
    """Check a whole config for the local engine.

    Args:
        raw: the resolved config as plain dicts and lists.

    Raises:
        ConfigError: with one line for every fault found.
    """
    reader = Reader(raw)
    get = reader.upstream
    model_dir = get("megatron_training", "tokenizer_name_or_path", "", (str,), required=True)
    train_iters = get("megatron_training", "train_iters", 1, low=1, required=True)
    batch = get("megatron_training", "global_batch_size", 1, low=1, required=True)
    samples = get("rl_config", "n_samples_per_prompt", 2, low=2, required=True)
    mini_batch = get("rl_config", "mini_batch_size", batch, low=1)
    if batch % mini_batch:
        reader.fault(f"megatron_training.global_batch_size = {batch} prompts must be a multiple of rl_config.mini_batch_size = {mini_batch}")
    layout = _read_layout(reader, get)
    shape = _read_shape(reader, model_dir)
    if shape:
        plan = Plan(shape, layout, Batch(batch, mini_batch, samples), padded_vocab_size=shape.vocab_size)
        for rule in broken(plan, LAYOUT_RULES):
            reader.fault(f"{rule.message} ({rule.rule}, docs/layouts.md)")

    recompute_layers = 0
    if granularity := get("megatron_training", "recompute_granularity", None, (str,)):
        method = get("megatron_training", "recompute_method", None, (str,))
        if (granularity, method) != ("full", "block"):
            reader.fault(f"megatron_training.recompute_granularity = {granularity!r} with recompute_method = {method!r}: the local engine has "
                         "'full' with 'block'")
        recompute_layers = get("megatron_training", "recompute_num_layers", 1, low=1, required=True)

    for key, only in (("adv_estimator", "group_norm"), ("kl_penalty", "low_var_kl")):
        if get("rl_config", key, only, (str,)) != only:
            reader.fault(f"rl_config.{key} = {raw['rl_config'][key]!r}: the local engine has {only!r}")
    if get("rl_config", "token_level_loss", True, (bool,)) is False:
        reader.fault("rl_config.token_level_loss = false: the local engine's loss is per token")
    if get("rl_config", "clip_higher_enable", False, (bool,)):
        clip = tuple(get("rl_config", f"clip_ratio_{side}", default, (float,), low=0) for side, default in (("low", 0.2), ("high", 0.28)))
    else:
        clip = (get("rl_config", "clip_ratio", 0.2, (float,), low=0),) * 2

    style = get("actor_config", "lr_decay_style", "constant", (str,))
    if style not in LR_STYLES:
        reader.fault("actor_config.lr_decay_style: " + unknown("style", style, LR_STYLES))
    dtype = get("generate_config", "dtype", "bfloat16", (str,))
    if dtype not in DTYPES:
        reader.fault("generate_config.dtype: " + unknown("dtype", dtype, DTYPES))

    sampling = get("generate_config", "sampling_config", {}, (dict,))
    max_tokens = reader.value("generate_config.sampling_config.max_tokens", sampling.get("max_tokens", 128), 128, (int,), 1, None)
    temperature = reader.value("generate_config.sampling_config.temperature", sampling.get("temperature", 1.0), 1.0, (float,), None, None)
    if temperature <= 0:
        reader.fault(f"generate_config.sampling_config.temperature = {temperature}: GRPO compares different answers, so it must be above 0")
    for key in sampling:
        if key not in SAMPLING_KEYS:
            reader.fault(unknown("key in generate_config.sampling_config:", key, SAMPLING_KEYS))
    for key, neutral in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if sampling.get(key, neutral) != neutral:
            reader.fault(f"generate_config.sampling_config.{key} = {sampling[key]!r}: the policy that is trained is the whole distribution, "
                         f"so the rollout must sample from the whole distribution: {key} = {neutral}")
    max_prompt = get("rl_config", "max_prompt_length", 512, low=1)
    max_model_len = get("generate_config", "max_model_len", max_prompt + max_tokens, low=2)
    if max_prompt + max_tokens > max_model_len:
        reader.fault(f"rl_config.max_prompt_length = {max_prompt} plus sampling max_tokens = {max_tokens} exceeds "
                     f"generate_config.max_model_len = {max_model_len}")
    warmup = get("actor_config", "lr_warmup_fraction", 0.0, (float,), low=0, high=0.99)
    try:
        targets = check_lora_targets(get("megatron_training", "lora_target_modules", None, (list, str), required=True))
    except ConfigError as error:
        targets = ()
        reader.fault(f"megatron_training.{error}" if str(error).startswith("lora") else f"megatron_training.lora_target_modules: {error}")
    verifiers = check_verifiers(reader, VERIFIERS)
    gsm8k, evaluation, run, local = (reader.own(section) for section in ("gsm8k", "eval", "run", "local"))
    aqn = check_aqn(reader, train_iters, lambda: count_rows(Path(gsm8k.train_file)))
    check_task_sections(reader, gsm8k, evaluation, run, ("train_file", "test_file"))
    for name in ("kv_cache_gib", "keep_checkpoints", "sync_buffer_mib"):
        if getattr(local, name) < 1:
            reader.fault(f"local.{name} = {getattr(local, name)} must be at least 1")
    available = psutil.virtual_memory().available / 2**30
    if local.kv_cache_gib >= available:
        reader.fault(f"local.kv_cache_gib = {local.kv_cache_gib}, but only {available:.1f} GiB of memory are available for vLLM's KV cache. "
                     "Ask for less, or free some")
    micro_batch = get("actor_config", "micro_batch_size", 1, low=1)
    lr, min_lr = get("actor_config", "lr", 1e-6, (float,), low=0, required=True), get("actor_config", "min_lr", 0.0, (float,), low=0)
    rollout_tp = get("generate_config", "infer_tensor_parallel_size", 1, low=1)
    if shape:
        _check_rollout_tp(reader, shape, rollout_tp)
    hardware = check_hardware_error(reader)
    for side in ("rollout", "evaluation"):
        if rollout_tp > 1 and hardware.kinds(side):
            reader.fault(f"hardware_error.{side} with generate_config.infer_tensor_parallel_size = {rollout_tp}: errors of other hardware are "
                         "modelled in a single engine only; set it to 1")
    if layout.tp > 1 and "gaussian" in hardware.kinds("training"):
        reader.fault(f"hardware_error.training = gaussian with tensor_model_parallel_size = {layout.tp}: its ranks hold copies of some adapters, "
                     "which would go different ways; use another kind, or expert, pipeline and data parallel ranks")
    lora_alpha = get("megatron_training", "lora_alpha", 1, (float,), required=True)
    if lr <= 0 or min_lr > lr:
        reader.fault(f"actor_config.lr = {lr} must be above 0 and not below actor_config.min_lr = {min_lr}")
    if lora_alpha <= 0:
        reader.fault(f"megatron_training.lora_alpha = {lora_alpha} must be above 0")
    result = dict(
        model_dir=model_dir, dtype=dtype, seed=get("megatron_training", "seed", 1, low=0), shape=shape, layout=layout,
        train_iters=train_iters, save_interval=get("megatron_training", "save_interval", None, low=1), global_batch_size=batch, mini_batch_size=mini_batch,
        micro_batch_size=micro_batch, recompute_layers=recompute_layers, samples_per_prompt=samples,
        ref_forward_micro_batch_size=get("rl_config", "ref_forward_micro_batch_size", micro_batch, low=1),
        actor_forward_micro_batch_size=get("rl_config", "actor_forward_micro_batch_size", micro_batch, low=1),
        epochs=get("rl_config", "epochs", 1, low=1), max_prompt_length=max_prompt, max_model_len=max_model_len,
        max_num_seqs=get("generate_config", "max_num_seqs", 256, low=1), rollout_tp=rollout_tp,
        lr=lr, min_lr=min_lr,
        lr_decay_style=style, lr_warmup_steps=int(warmup * train_iters),
        weight_decay=get("actor_config", "weight_decay", 0.01, (float,), low=0),
        adam_betas=(get("actor_config", "adam_beta1", 0.9, (float,), low=0, high=0.999999),
                    get("actor_config", "adam_beta2", 0.999, (float,), low=0, high=0.999999)),
        clip_grad=get("actor_config", "clip_grad", 1.0, (float,), low=0), clip_low=clip[0], clip_high=clip[1],
        kl_coefficient=get("rl_config", "init_kl_coef", 0.01, (float,), low=0), correction_cap=check_correction(reader),
        lora_r=get("megatron_training", "lora_r", 1, low=1, required=True), lora_alpha=lora_alpha,
        lora_targets=targets, verifiers=verifiers,
        sampling=Sampling(max_tokens, temperature),
        aqn=aqn, hardware_error=hardware, gsm8k=gsm8k, eval=evaluation, run=run, local=local,
    )
    ignored = check_names(reader)
    if reader.faults:
        raise ConfigError("\n".join(reader.faults))
    return RunConfig(**result, ignored_keys=ignored, warnings=tuple(reader.warnings))
