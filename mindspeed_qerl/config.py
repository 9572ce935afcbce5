"""Everything about a run that can be known to be wrong before anything heavy is imported.

A config has MindSpeed-RL's own sections (`megatron_training`, `actor_config`, `rl_config`, `generate_config`, `model`) and ours
(`engine`, `aqn`, `gsm8k`, `eval`, `run`, `local`), which upstream ignores. `check` reads the whole, names every fault at once, and
returns a `RunConfig` with the values the local engine uses. No torch here.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.aqn.targets import check_targets
from mindspeed_qerl.gsm8k.verifier import VERIFIERS
from mindspeed_qerl.upstream_keys import GENERATE_KEYS, MEGATRON_KEYS, RL_KEYS, SAMPLING_KEYS

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ENGINES = ("local",)
LOCAL_RANKS = (1, 2)
LOCAL_MODELS = ("qwen3_moe",)
EXPERT_WIDTH_STEP = 32  # vllm fused_moe/experts/cpu_moe.py: CPUUnquantizedExperts.output_alignment
DTYPES = ("float32", "bfloat16")
LR_STYLES = ("constant", "linear", "cosine")
PROMPTS = ("chat", "plain")


class ConfigError(ValueError):
    """A config, a path or an input that cannot work; the message names the value, the rule and the way out."""


def unknown(kind: str, value: object, known: Iterable[str]) -> str:
    """One sentence for an unknown name, with the nearest known one and the list."""
    known = sorted(known)
    near = difflib.get_close_matches(str(value), known, n=1)
    return f"unknown {kind} {value!r}" + (f", did you mean {near[0]!r}?" if near else "") + f" Known: {', '.join(known)}"


def check_lora_targets(targets: Iterable[str] | None) -> tuple[str, ...]:
    """The targets as a tuple; ConfigError for an empty list or a name that is none of `LORA_TARGETS`."""
    targets = (targets,) if isinstance(targets, str) else tuple(targets or ())
    if not targets:
        raise ConfigError(f"lora_target_modules is empty. Known: {', '.join(LORA_TARGETS)}")
    for target in targets:
        if target not in LORA_TARGETS:
            raise ConfigError(unknown("LoRA target", target, LORA_TARGETS))
    return targets


@dataclass(frozen=True)
class AQNConfig:
    """Noise on the RMSNorm weights of the rollout model; see docs/aqn.md."""

    enabled: bool = False
    schedule: str = "exponential"
    sigma_start: float = 0.05
    sigma_end: float = 0.0005
    num_stages: int = 10
    targets: Any = "auto"
    exclude: tuple[str, ...] = ()
    seed: int | None = None

    def noise_schedule(self, total_steps: int) -> NoiseSchedule:
        """The schedule over a run of `total_steps`; ValueError if a value is out of range."""
        return NoiseSchedule(kind=self.schedule, sigma_start=self.sigma_start, sigma_end=self.sigma_end, num_stages=self.num_stages,
                             total_steps=total_steps)


@dataclass(frozen=True)
class GSM8KConfig:
    """The task: files from tools/convert_gsm8k.py, and how a question becomes a prompt ("chat" or "plain")."""

    train_file: str = ""
    test_file: str = ""
    prompt: str = "chat"


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation, noise off, before the first step, every `every` steps and after the last; n_problems null = the whole test file."""

    every: int = 10
    n_problems: int | None = None
    samples_per_problem: int = 1
    temperature: float = 1.0


@dataclass(frozen=True)
class RunSection:
    """Where a run is kept and what is written beside metrics.jsonl."""

    root: str = "runs"
    name: str | None = None
    tensorboard: bool = True
    wandb_project: str | None = None
    rollout_samples: int = 8


@dataclass(frozen=True)
class LocalConfig:
    """The local engine's own needs; kv_cache_gib is vLLM's memory for keys and values, GiB."""

    kv_cache_gib: int = 1


@dataclass(frozen=True)
class Sampling:
    """generate_config.sampling_config; top_p, top_k and min_p must leave the distribution whole."""

    max_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """What the local engine runs on. Batch sizes count prompts, except micro_batch_size (sequences)."""

    model_dir: str
    dtype: str
    seed: int
    ranks: int
    expert_parallel: int
    train_iters: int
    global_batch_size: int
    mini_batch_size: int
    micro_batch_size: int
    samples_per_prompt: int
    epochs: int
    max_prompt_length: int
    max_model_len: int
    max_num_seqs: int
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
    lora_r: int
    lora_alpha: float
    lora_targets: tuple[str, ...]
    verifiers: tuple[tuple[str, float], ...]
    sampling: Sampling
    aqn: AQNConfig
    gsm8k: GSM8KConfig
    eval: EvalConfig
    run: RunSection
    local: LocalConfig
    ignored_keys: tuple[str, ...]


OWN_SECTIONS = {"aqn": AQNConfig, "gsm8k": GSM8KConfig, "eval": EvalConfig, "run": RunSection, "local": LocalConfig}
UPSTREAM_SECTIONS = {"megatron_training": MEGATRON_KEYS, "actor_config": MEGATRON_KEYS, "rl_config": RL_KEYS,
                     "generate_config": GENERATE_KEYS}
TOP_LEVEL = {"engine", "model", *OWN_SECTIONS, *UPSTREAM_SECTIONS}

class _Reader:
    """Reads sections, collects every fault, and remembers which upstream keys the local engine honours."""

    def __init__(self, raw: Mapping[str, Any]):
        self.raw = raw
        self.faults: list[str] = []
        self.honoured: set[tuple[str, str]] = set()

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def upstream(self, section: str, key: str, default: Any = None, kind: type | tuple = (int,), *, low: float | None = None,
                 high: float | None = None, required: bool = False) -> Any:
        """The value of an upstream key, checked for type and closed range; a fault and the default if it is wrong."""
        self.honoured.add((section, key))
        value = (self.raw.get(section) or {}).get(key)
        if section == "actor_config" and value is None:  # upstream reads both as one: MegatronConfig({**megatron_training, **actor_config})
            section = "megatron_training"
            self.honoured.add((section, key))
            value = (self.raw.get(section) or {}).get(key)
        if value is None:
            if required:
                self.fault(f"{section}.{key} is missing")
            return default
        return self.value(f"{section}.{key}", value, default, kind, low, high)

    def value(self, name: str, value: Any, default: Any, kind: type | tuple, low: float | None, high: float | None) -> Any:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, str):  # YAML 1.1 reads 5e-6 as text
            try:
                value = float(value)
            except ValueError:
                pass
        accepted = kinds + ((int,) if float in kinds else ())
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
            self.fault(f"{name} = {value!r} must be {' or '.join(k.__name__ for k in kinds)}")
            return default
        if float in kinds and isinstance(value, float) and not math.isfinite(value):
            self.fault(f"{name} = {value} must be finite")
            return default
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = " and ".join(filter(None, [f"at least {low}" if low is not None else "", f"at most {high}" if high is not None else ""]))
            self.fault(f"{name} = {value} must be {bounds}")
            return default
        return value

    def own(self, section: str) -> Any:
        cls = OWN_SECTIONS[section]
        given = self.raw.get(section) or {}
        if not isinstance(given, Mapping):
            self.fault(f"section {section} must be a mapping of {', '.join(f.name for f in fields(cls))}, not {given!r}")
            return cls()
        known = {f.name: f for f in fields(cls)}
        for key in given:
            if key not in known:
                self.fault(unknown(f"key in {section}:", key, known))
        values = {}
        for key, field in known.items():
            if key not in given:
                continue
            value = given[key]
            optional = "None" in str(field.type)
            kind = next((k for k in (bool, int, float, str) if str(field.type).startswith(k.__name__) or field.type is k), None)
            if value is None and optional or kind is None:
                values[key] = tuple(value) if isinstance(value, list) else value
            elif value is None:
                self.fault(f"{section}.{key} may not be null")
            else:
                values[key] = self.value(f"{section}.{key}", value, field.default, kind, None, None)
        return cls(**values)


def _check_names(reader: _Reader) -> tuple[str, ...]:
    """Faults for unknown sections and keys; returns the upstream keys that are known and not honoured."""
    ignored = []
    for section in reader.raw:
        if section not in TOP_LEVEL:
            reader.fault(unknown("section", section, TOP_LEVEL))
    for section, known in UPSTREAM_SECTIONS.items():
        for key in reader.raw.get(section) or {}:
            if key not in known:
                reader.fault(unknown(f"key in {section}:", key, known))
            elif (section, key) not in reader.honoured:
                ignored.append(f"{section}.{key}")
    ignored += ["model"] if "model" in reader.raw else []
    return tuple(ignored)


def _check_verifiers(reader: _Reader) -> tuple[tuple[str, float], ...]:
    names = reader.upstream("rl_config", "verifier_function", ["gsm8k"], (list,))
    weights = reader.upstream("rl_config", "verifier_weight", [1.0] * len(names), (list,))
    for name in names:
        if not isinstance(name, str) or name not in VERIFIERS:
            reader.fault("rl_config.verifier_function: " + unknown("verifier", name, VERIFIERS))
    if len(names) != len(weights) or not names:
        reader.fault(f"rl_config: {len(names)} verifier_function and {len(weights)} verifier_weight must be as many, and at least one")
    weights = [reader.value(f"rl_config.verifier_weight[{i}]", weight, 1.0, (float,), None, None) for i, weight in enumerate(weights)]
    return tuple(zip(names, weights))


def _check_aqn(reader: _Reader, train_iters: int) -> AQNConfig:
    aqn = reader.own("aqn")
    if aqn.enabled:
        try:
            aqn.noise_schedule(train_iters)
            check_targets(aqn.exclude)
            if not check_targets(aqn.targets):
                raise ValueError("targets is empty; to run without noise, use aqn=off")
        except ValueError as error:
            reader.fault(f"aqn: {error}")
    return aqn


def _check_model_dir(reader: _Reader, path: str, expert_parallel: int) -> None:
    config_file = Path(path) / "config.json"
    if not config_file.is_file():
        reader.fault(f"megatron_training.tokenizer_name_or_path = {path!r}: no config.json there. Give a Hugging Face model "
                     "directory; the quickstart's is made by `python tools/make_tiny_model.py --output models/tiny_qwen3_moe`")
        return
    try:
        shape = json.loads(config_file.read_text())
    except ValueError as error:
        reader.fault(f"{config_file} is not valid JSON: {error}")
        return
    if not isinstance(shape, dict):
        reader.fault(f"{config_file} holds no JSON object")
        return
    experts = shape.get("num_experts", shape.get("num_local_experts"))  # transformers 5 writes the second
    if shape.get("model_type") not in LOCAL_MODELS:
        reader.fault(f"{config_file}: " + unknown("model_type for the local engine", shape.get("model_type"), LOCAL_MODELS))
    elif not isinstance(experts, int):
        reader.fault(f"{config_file}: num_experts = {experts!r} must be int")
    elif experts % expert_parallel:
        reader.fault(f"{experts} experts of {path} cannot be shared equally by expert_model_parallel_size = {expert_parallel}")
    elif (width := shape.get("moe_intermediate_size")) and width % EXPERT_WIDTH_STEP:
        reader.fault(f"{config_file}: moe_intermediate_size = {width} must be a multiple of {EXPERT_WIDTH_STEP}; vLLM's CPU backend pads "
                     "other widths, and padded experts cannot be updated in place")


def check(raw: Mapping[str, Any]) -> RunConfig:
    """Check a whole config for the local engine.

    Args:
        raw: the resolved config as plain dicts and lists.

    Raises:
        ConfigError: with one line for every fault found.
    """
    reader = _Reader(raw)
    if raw.get("engine") not in ENGINES:
        raise ConfigError(unknown("engine", raw.get("engine"), ENGINES))
    for section in UPSTREAM_SECTIONS:
        if not isinstance(raw.get(section) or {}, Mapping):
            raise ConfigError(f"section {section} must be a mapping, not {raw[section]!r}")
    get = reader.upstream
    model_dir = get("megatron_training", "tokenizer_name_or_path", "", (str,), required=True)
    train_iters = get("megatron_training", "train_iters", 1, low=1, required=True)
    batch = get("megatron_training", "global_batch_size", 1, low=1, required=True)
    samples = get("rl_config", "n_samples_per_prompt", 2, low=2, required=True)
    mini_batch = get("rl_config", "mini_batch_size", batch, low=1)
    if batch % mini_batch:
        reader.fault(f"megatron_training.global_batch_size = {batch} prompts must be a multiple of rl_config.mini_batch_size = {mini_batch}")
    resources = get("rl_config", "actor_resource", {}, (dict,))
    for key in resources.keys() - {"num_npus"}:
        reader.fault(unknown("key in rl_config.actor_resource:", key, ["num_npus"]))
    ranks = reader.value("rl_config.actor_resource.num_npus", resources.get("num_npus", 1), 1, (int,), 1, None)
    if ranks not in LOCAL_RANKS:
        reader.fault(f"rl_config.actor_resource.num_npus = {ranks}: the local engine runs {' or '.join(map(str, LOCAL_RANKS))} ranks")
    expert_parallel = get("actor_config", "expert_model_parallel_size", 1, low=1)
    if ranks % expert_parallel:
        reader.fault(f"actor_config.expert_model_parallel_size = {expert_parallel} must divide the {ranks} ranks")
    for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if (size := get("actor_config", key, 1)) != 1:
            reader.fault(f"actor_config.{key} = {size}: the local engine runs it at 1 only, with expert_model_parallel_size 1 or 2")
    if mini_batch * samples % ranks:
        reader.fault(f"{mini_batch} prompts x {samples} samples of a mini-batch cannot be shared equally by {ranks} ranks")

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
    verifiers = _check_verifiers(reader)
    aqn = _check_aqn(reader, train_iters)
    gsm8k, evaluation, run, local = (reader.own(section) for section in ("gsm8k", "eval", "run", "local"))
    if gsm8k.prompt not in PROMPTS:
        reader.fault("gsm8k.prompt: " + unknown("prompt form", gsm8k.prompt, PROMPTS))
    for key in ("train_file", "test_file"):
        if not Path(getattr(gsm8k, key)).is_file():
            reader.fault(f"gsm8k.{key} = {getattr(gsm8k, key)!r}: no such file. Make it with `python tools/convert_gsm8k.py --input "
                         "DIR_OR_HUB_NAME --output DIR`, or for the quickstart `python tools/make_tiny_model.py --output models/tiny_qwen3_moe`")
    for name, value in (("eval.every", evaluation.every), ("eval.samples_per_problem", evaluation.samples_per_problem),
                        ("local.kv_cache_gib", local.kv_cache_gib), ("eval.n_problems", evaluation.n_problems),
                        ("run.rollout_samples", run.rollout_samples)):
        least = 0 if name == "run.rollout_samples" else 1
        if value is not None and value < least:
            reader.fault(f"{name} = {value} must be at least {least}")
    if evaluation.temperature < 0 or (evaluation.temperature == 0 and evaluation.samples_per_problem > 1):
        reader.fault(f"eval.temperature = {evaluation.temperature} with eval.samples_per_problem = {evaluation.samples_per_problem}: it must be "
                     "above 0, or 0 (greedy) with 1 sample")
    available = psutil.virtual_memory().available / 2**30
    if local.kv_cache_gib >= available:
        reader.fault(f"local.kv_cache_gib = {local.kv_cache_gib}, but only {available:.1f} GiB of memory are available for vLLM's KV cache. "
                     "Ask for less, or free some")
    _check_model_dir(reader, model_dir, expert_parallel)
    lr, min_lr = get("actor_config", "lr", 1e-6, (float,), low=0, required=True), get("actor_config", "min_lr", 0.0, (float,), low=0)
    lora_alpha = get("megatron_training", "lora_alpha", 1, (float,), required=True)
    if lr <= 0 or min_lr > lr:
        reader.fault(f"actor_config.lr = {lr} must be above 0 and not below actor_config.min_lr = {min_lr}")
    if lora_alpha <= 0:
        reader.fault(f"megatron_training.lora_alpha = {lora_alpha} must be above 0")
    result = dict(
        model_dir=model_dir, dtype=dtype, seed=get("megatron_training", "seed", 1, low=0), ranks=ranks, expert_parallel=expert_parallel,
        train_iters=train_iters, global_batch_size=batch, mini_batch_size=mini_batch,
        micro_batch_size=get("actor_config", "micro_batch_size", 1, low=1), samples_per_prompt=samples,
        epochs=get("rl_config", "epochs", 1, low=1), max_prompt_length=max_prompt, max_model_len=max_model_len,
        max_num_seqs=get("generate_config", "max_num_seqs", 256, low=1),
        lr=lr, min_lr=min_lr,
        lr_decay_style=style, lr_warmup_steps=int(warmup * train_iters),
        weight_decay=get("actor_config", "weight_decay", 0.01, (float,), low=0),
        adam_betas=(get("actor_config", "adam_beta1", 0.9, (float,), low=0, high=0.999999),
                    get("actor_config", "adam_beta2", 0.999, (float,), low=0, high=0.999999)),
        clip_grad=get("actor_config", "clip_grad", 1.0, (float,), low=0), clip_low=clip[0], clip_high=clip[1],
        kl_coefficient=get("rl_config", "init_kl_coef", 0.01, (float,), low=0),
        lora_r=get("megatron_training", "lora_r", 1, low=1, required=True), lora_alpha=lora_alpha,
        lora_targets=targets, verifiers=verifiers,
        sampling=Sampling(max_tokens, temperature),
        aqn=aqn, gsm8k=gsm8k, eval=evaluation, run=run, local=local,
    )
    ignored = _check_names(reader)
    if reader.faults:
        raise ConfigError("\n".join(reader.faults))
    return RunConfig(**result, ignored_keys=ignored)
