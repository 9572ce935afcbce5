"""What both engines read of a config: our sections, upstream's key names, and the checks they share. No torch here.

A config has MindSpeed-RL's own sections (`megatron_training`, `actor_config`, `rl_config`, `generate_config`, `model`) and ours
(`engine`, `emulate_npu`, `aqn`, `gsm8k`, `eval`, `run`, `local`), which upstream ignores. Each engine's settings.py reads the whole with
a `Reader`, which names every fault at once.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mindspeed_qerl.aqn.schedule import NoiseSchedule
from mindspeed_qerl.aqn.targets import check_multipliers, check_targets
from mindspeed_qerl.errors import ConfigError, unknown
from mindspeed_qerl.recipe.upstream_keys import GENERATE_KEYS, MEGATRON_KEYS, RL_KEYS

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
PROMPTS = ("chat", "plain")


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
    restart_every: Any = None  # null, "epoch" (of the training data), or steps; `check_aqn` turns an epoch into steps
    multipliers: Any = None  # of sigma, by layer or target: {"0-11": 2.0, "post_attention@12": 0}
    multipliers_file: str | None = None  # more of them, YAML or JSON: a measured profile {layer: multiplier}
    seed: int | None = None

    def noise_schedule(self, total_steps: int) -> NoiseSchedule:
        """The schedule over a run of `total_steps`; ValueError if a value is out of range."""
        return NoiseSchedule(kind=self.schedule, sigma_start=self.sigma_start, sigma_end=self.sigma_end, num_stages=self.num_stages,
                             total_steps=total_steps, restart_every=self.restart_every)

    def all_multipliers(self) -> list[tuple[str, float]]:
        """Those of the config and of the file, as `NoiseInjector` takes them; ValueError if one is wrong, OSError if there is no such file."""
        import yaml

        given = self.multipliers or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"multipliers must be a mapping of layers or targets to numbers, such as {{0-11: 2.0}}, not {given!r}")
        multipliers = check_multipliers(given)
        if self.multipliers_file:
            try:
                profile = yaml.safe_load(Path(self.multipliers_file).read_text(encoding="utf-8"))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ConfigError(f"multipliers_file = {self.multipliers_file!r} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
            if not isinstance(profile, Mapping):
                raise ConfigError(f"multipliers_file = {self.multipliers_file!r} must hold a mapping of layers to numbers, such as 0: 1.5")
            multipliers += check_multipliers(profile)
        return multipliers

    @property
    def data_files(self) -> dict[str, str]:
        return {"aqn_multipliers": self.multipliers_file} if self.enabled and self.multipliers_file else {}


@dataclass(frozen=True)
class RolloutCorrection:
    """What is done about answers that another policy sampled than the one that is trained: "none", or "token_tis", each token's loss times
    min(p_trained / p_sampled, cap)."""

    method: str = "none"
    cap: float = 2.0


@dataclass(frozen=True)
class HardwareError:
    """Which side of a run on the local engine computes as other hardware would, and how (docs/hardware_error.md): "none", one of
    `HARDWARE_ERRORS` or a list of them for each of rollout, training and evaluation."""

    rollout: Any = "none"
    training: Any = "none"
    evaluation: Any = "none"
    gaussian_std: float = 0.05
    block: int = 64

    def kinds(self, side: str) -> tuple[str, ...]:
        """Of "rollout", "training" or "evaluation"; () for none."""
        given = getattr(self, side)
        return () if given in ("none", None) else tuple(given) if isinstance(given, (list, tuple)) else (given,)

    def arguments(self, side: str) -> dict[str, Any] | None:
        """For `HardwareErrorMode`; None if this side computes as it is."""
        kinds = self.kinds(side)
        return {"kinds": kinds, "gaussian_std": self.gaussian_std, "block": self.block} if kinds else None


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
    """Where a run is kept and what is written beside metrics.jsonl; `resume` is the directory of a run that stopped, to go on with it,
    or "auto": the newest one of this config, if there is one."""

    root: str = "runs"
    name: str | None = None
    resume: str | None = None
    tensorboard: bool = True
    wandb_project: str | None = None
    rollout_samples: int = 8


@dataclass(frozen=True)
class LocalConfig:
    """The local engine's own needs: vLLM's memory for keys and values, GiB; how many checkpoints are kept; how much of its merged weights a
    rank hands over at once, MiB."""

    kv_cache_gib: int = 1
    keep_checkpoints: int = 2
    sync_buffer_mib: int = 64


@dataclass(frozen=True)
class RehearsalConfig:
    """Try a config for NPUs here (docs/rehearsal.md): a narrow model made below `models`, for `steps` steps, answers of at most `max_tokens`
    tokens; `layers` null = as many as the model has."""

    enabled: bool = False
    steps: int = 2
    layers: int | None = None
    max_tokens: int = 8
    eval_problems: int = 8
    models: str = "models/rehearsal"


OWN_SECTIONS = {"aqn": AQNConfig, "gsm8k": GSM8KConfig, "eval": EvalConfig, "run": RunSection, "local": LocalConfig,
                "rehearsal": RehearsalConfig, "rollout_correction": RolloutCorrection, "hardware_error": HardwareError}
UPSTREAM_SECTIONS = {"megatron_training": MEGATRON_KEYS, "actor_config": MEGATRON_KEYS, "rl_config": RL_KEYS,
                     "generate_config": GENERATE_KEYS}
TOP_LEVEL = {"engine", "seed", "emulate_npu", "model", *OWN_SECTIONS, *UPSTREAM_SECTIONS}


class Reader:
    """Reads sections, collects every fault, and remembers which upstream keys were read."""

    def __init__(self, raw: Mapping[str, Any]):
        for section in UPSTREAM_SECTIONS:
            if not isinstance(raw.get(section) or {}, Mapping):
                raise ConfigError(f"section {section} must be a mapping, not {raw[section]!r}")
        self.raw = raw
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.honoured: set[tuple[str, str]] = set()

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

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


def check_names(reader: Reader) -> tuple[str, ...]:
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


def check_verifiers(reader: Reader, known: Iterable[str]) -> tuple[tuple[str, float], ...]:
    names = reader.upstream("rl_config", "verifier_function", ["gsm8k"], (list,))
    weights = reader.upstream("rl_config", "verifier_weight", [1.0] * len(names), (list,))
    for name in names:
        if not isinstance(name, str) or name not in known:
            reader.fault("rl_config.verifier_function: " + unknown("verifier", name, known))
    if len(names) != len(weights) or not names:
        reader.fault(f"rl_config: {len(names)} verifier_function and {len(weights)} verifier_weight must be as many, and at least one")
    weights = [reader.value(f"rl_config.verifier_weight[{i}]", weight, 1.0, (float,), None, None) for i, weight in enumerate(weights)]
    return tuple(zip(names, weights))


BF16_LEAST_SIGMA = 9e-4  # below it bfloat16 keeps less than half of the noise on weights of 1 (tests/aqn/test_aqn_injector.py)


def check_aqn(reader: Reader, train_iters: int, rows: Callable[[], int | None]) -> AQNConfig:
    """The section aqn; faults for what cannot be, a warning for stages that bfloat16 cannot hold.

    Args:
        rows: how many rows the training data has; asked only if the schedule restarts each epoch.
    """
    aqn = reader.own("aqn")
    if aqn.enabled:
        try:
            if aqn.restart_every == "epoch":
                count = rows()
                if not count:
                    raise ValueError("restart_every = 'epoch' counts the rows of the training data, and these have none: give a number of steps")
                aqn = replace(aqn, restart_every=math.ceil(count / reader.upstream("megatron_training", "global_batch_size", 1, low=1)))
            schedule = aqn.noise_schedule(train_iters)
            aqn.all_multipliers()
            check_targets(aqn.exclude)
            if not check_targets(aqn.targets):
                raise ValueError("targets is empty; to run without noise, use aqn=off")
        except (ValueError, OSError) as error:
            reader.fault(f"aqn: {error}")
        else:
            sigmas = schedule.sigmas()
            small = [step for step, sigma in enumerate(sigmas, 1) if 0 < sigma < BF16_LEAST_SIGMA]
            if small and reader.upstream("generate_config", "dtype", "bfloat16", (str,)) == "bfloat16":
                reader.warn(f"aqn: sigma is below {BF16_LEAST_SIGMA:g} in {len(small)} of {train_iters} steps (first in step {small[0]}), where "
                            "bfloat16 rounds most of it away on norm weights near 1; aqn/measured_std will say what is left "
                            "(docs/aqn.md). Raise aqn.sigma_end to keep it")
    return aqn


CORRECTIONS = ("none", "token_tis")


def check_correction(reader: Reader) -> float | None:
    """The cap of token-level truncated importance sampling, None without it."""
    correction = reader.own("rollout_correction")
    if correction.method not in CORRECTIONS:
        reader.fault("rollout_correction.method: " + unknown("method", correction.method, CORRECTIONS))
    if correction.cap < 1:
        reader.fault(f"rollout_correction.cap = {correction.cap} must be at least 1: below it even answers of the policy itself count for less")
    return correction.cap if correction.method == "token_tis" else None


HARDWARE_ERRORS = ("gaussian", "bf16_blocks", "reordered", "silu_table")  # local/hardware_error.py has the formulas


def check_hardware_error(reader: Reader) -> HardwareError:
    """The section hardware_error, and its faults."""
    hardware = reader.own("hardware_error")
    for side in ("rollout", "training", "evaluation"):
        for kind in hardware.kinds(side):
            if kind not in HARDWARE_ERRORS:
                reader.fault(f"hardware_error.{side}: " + unknown("kind", kind, ("none", *HARDWARE_ERRORS)))
    if not 0 < hardware.gaussian_std < 1:
        reader.fault(f"hardware_error.gaussian_std = {hardware.gaussian_std} must be between 0 and 1: it is a relative error; for none, name no kind")
    if hardware.block < 1:
        reader.fault(f"hardware_error.block = {hardware.block} must be at least 1")
    return hardware


def check_task_sections(reader: Reader, gsm8k: GSM8KConfig, evaluation: EvalConfig, run: RunSection, files: Iterable[str]) -> None:
    """Faults in the sections gsm8k, eval and run; `files` names the keys of gsm8k whose files must be there."""
    if gsm8k.prompt not in PROMPTS:
        reader.fault("gsm8k.prompt: " + unknown("prompt form", gsm8k.prompt, PROMPTS))
    for key in files:
        if not Path(getattr(gsm8k, key)).is_file():
            quickstart = ", or for the quickstart `python tools/make_tiny_model.py --output models/tiny_qwen3_moe`"
            reader.fault(f"gsm8k.{key} = {getattr(gsm8k, key)!r}: no such file. Make it with `python tools/convert_gsm8k.py --input "
                         f"DIR_OR_HUB_NAME --output DIR`{quickstart if reader.raw.get('engine') == 'local' else ''}")
    for name, value in (("eval.every", evaluation.every), ("eval.samples_per_problem", evaluation.samples_per_problem),
                        ("eval.n_problems", evaluation.n_problems), ("run.rollout_samples", run.rollout_samples)):
        least = 0 if name == "run.rollout_samples" else 1
        if value is not None and value < least:
            reader.fault(f"{name} = {value} must be at least {least}")
    if evaluation.temperature < 0 or (evaluation.temperature == 0 and evaluation.samples_per_problem > 1):
        reader.fault(f"eval.temperature = {evaluation.temperature} with eval.samples_per_problem = {evaluation.samples_per_problem}: it must be "
                     "above 0, or 0 (greedy) with 1 sample")
