"""What a config of the MindSpeed-RL engine must hold before anything heavy is imported. No torch, no upstream here.

The sections `model`, `megatron_training`, `actor_config`, `rl_config` and `generate_config` go to upstream as they are; upstream checks
them once more (config_cls/validate_config.py), after minutes and without our names. The rules below are those that upstream lacks, or
that it only meets in the middle of a run. Layouts and batches have their own (layout/rules.py), which are asked here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.ascend.contract import UPSTREAM_VERIFIERS
from mindspeed_qerl.errors import ConfigError
from mindspeed_qerl.families import FAMILIES, Family, read_config
from mindspeed_qerl.families.megatron import compare_with_model
from mindspeed_qerl.layout.plan import arguments_of, read_plan, shape_of_model
from mindspeed_qerl.layout.rules import broken
from mindspeed_qerl.recipe.config import (
    CONFIGS,
    AQNConfig,
    EvalConfig,
    GSM8KConfig,
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
from mindspeed_qerl.tasks.gsm8k.packed import count_documents
from mindspeed_qerl.tasks.gsm8k.verifier import VERIFIERS

# Upstream keys with one value that works here: section, key, value, why.
FIXED = (
    ("megatron_training", "stage", "ray_grpo", "the engine runs GRPO"),
    ("megatron_training", "split", "100,0,0", "the test set is evaluated through the rollout engine, from gsm8k.test_file"),
    ("rl_config", "use_integrated_worker", True, "actor, reference and rollout share each NPU"),
    ("rl_config", "rule_reward", True, "GSM8K is scored by a rule"),
    ("generate_config", "enforce_eager", True, "a captured graph replays the addresses of weights that move at every sync"),
)
REFUSED = (  # upstream keys that must stay off
    ("rl_config", "use_wandb", "set run.wandb_project instead"),
    ("rl_config", "use_tensorboard", "set run.tensorboard instead"),
    ("rl_config", "use_swanlab", "upstream's logger would miss the evaluations"),
    ("rl_config", "async_engine", "AQN and the seeds of prompts are in the synchronous rollout"),
    ("rl_config", "multi_turn_enable", "GSM8K has one turn"),
    ("rl_config", "is_multimodal", "the task is text"),
    ("megatron_training", "prompt_type", "the prompt is in the data already; tools/convert_gsm8k.py --format mindspeed puts it there"),
)
LORA_MOE_REFUSED = (
    ("moe_alltoall_overlap_comm", "its fused backward (MindSpeed-LLM tasks/posttrain/lora/moe/experts.py) does not know merged experts"),
    ("lora_fusion", "it uses MC2 kernels and replaces the forward that switches adapters off"),
    ("recompute_activation_function", "LoRA on grouped experts keeps its activations"),
)

MAY_CHANGE = frozenset()  # nothing: a checkpoint is of one layout


@dataclass(frozen=True)
class WorkerSettings:
    """What travels to the NPU workers as `rl_config.qerl`."""

    seed: int
    aqn: AQNConfig


@dataclass(frozen=True)
class Settings:
    """A checked config. `upstream` are the sections for upstream, plain Python; `extra_arguments` become Megatron arguments that
    upstream's MegatronConfig has no key for."""

    upstream: dict[str, Any]
    extra_arguments: dict[str, Any]
    model_dir: str
    seed: int
    train_iters: int
    npus: int
    cpus_per_npu: int
    cpus_for_tasks: int
    vllm_dp_size: int
    hccl_buffer_mib: int
    samples_per_prompt: int
    max_prompt_length: int
    lora_targets: tuple[str, ...]
    verifiers: tuple[tuple[str, float], ...]
    aqn: AQNConfig
    gsm8k: GSM8KConfig
    eval: EvalConfig
    run: RunSection
    emulate_npu: bool
    data_files: dict[str, str]
    warnings: tuple[str, ...] = ()
    ignored_keys: tuple[str, ...] = ()  # upstream gets every key

    @property
    def worker(self) -> WorkerSettings:
        return WorkerSettings(seed=self.seed, aqn=self.aqn)


TRANSFER_DOCK_CPUS = 10  # trainer/utils/transfer_dock.py:248


def needed_cpus(npus: int, cpus_per_npu: int, cpus_for_tasks: int) -> int:
    """Logical CPUs that upstream reserves: a bundle per NPU (launcher.py:90-104), the reward process (cli/train_grpo.py:155), the task
    that computes advantages, and the transfer dock."""
    return npus * cpus_per_npu + 2 * cpus_for_tasks + TRANSFER_DOCK_CPUS


def npu_environment() -> dict[str, str]:
    """The variables of configs/envs/runtime_env.yaml: for every process on NPUs, unless the shell says otherwise."""
    import yaml

    return yaml.safe_load((CONFIGS / "envs" / "runtime_env.yaml").read_text(encoding="utf-8"))["env_vars"]


def check(raw: Mapping[str, Any]) -> Settings:
    """Read the resolved config; ConfigError names every fault, one a line."""
    reader = Reader(raw)
    get = reader.upstream
    training = {**(raw.get("megatron_training") or {}), **(raw.get("actor_config") or {})}
    model_dir = get("megatron_training", "tokenizer_name_or_path", "", (str,), required=True)
    for section, key, value, why in FIXED:
        if get(section, key, None, (bool, str)) != value:
            reader.fault(f"{section}.{key} = {(raw.get(section) or {}).get(key)!r} must be {value!r}: {why}")
    for section, key, why in REFUSED:
        if get(section, key, None, (bool, str)):
            reader.fault(f"{section}.{key} must be left out or false: {why}")

    family = _check_model(reader, model_dir, arguments_of(raw))
    targets = _check_lora(reader, training, family is not None and family.experts)
    sampling = (raw.get("generate_config") or {}).get("sampling_config") or {}
    seed = get("megatron_training", "seed", 1234, low=0)
    train_iters = get("megatron_training", "train_iters", 1, low=1, required=True)
    resource = (raw.get("rl_config") or {}).get("actor_resource") or {}
    npus = reader.value("rl_config.actor_resource.num_npus", resource.get("num_npus"), 1, int, 1, None)
    infer_ep = get("generate_config", "infer_expert_parallel_size", 1, low=1)
    _check_layout(reader, raw)
    if get("megatron_training", "dataset_additional_keys", [], (list,)) != ["labels"]:
        reader.fault("megatron_training.dataset_additional_keys must be [labels]: the verifier reads the gold answers from there")

    gsm8k, evaluation, run = (reader.own(section) for section in ("gsm8k", "eval", "run"))
    check_task_sections(reader, gsm8k, evaluation, run, ("test_file",))
    if gsm8k.prompt != "chat":
        reader.fault(f"gsm8k.prompt = {gsm8k.prompt!r} must be 'chat': the packed training data holds chat prompts, and evaluation must "
                     "ask alike")
    verifiers = check_verifiers(reader, (*VERIFIERS, *UPSTREAM_VERIFIERS))
    if get("actor_config", "save", None, (str,)):
        reader.fault("actor_config.save must be left out: checkpoints are kept in the run directory")
    if run.resume and not get("actor_config", "load", None, (str,)):
        reader.fault("run.resume needs actor_config.load, the base weights: checkpoints hold the adapters only")
    if check_correction(reader):
        reader.fault("rollout_correction.method must be none: MindSpeed-RL keeps no logprobs of the policy that sampled")
    hardware = check_hardware_error(reader)
    for side in ("rollout", "training", "evaluation"):
        if hardware.kinds(side):
            reader.fault(f"hardware_error.{side} must be none: errors are modelled on the local engine only, NPUs have their own")
    packed = _packed_files(reader, get("megatron_training", "data_path", "", (str,), required=True))
    aqn = check_aqn(reader, train_iters, lambda: count_documents(Path(packed["train_input_ids"]).with_suffix(".idx")))
    data_files = {"test": gsm8k.test_file, **packed, **aqn.data_files}
    emulate = raw.get("emulate_npu", False)
    if not isinstance(emulate, bool):
        reader.fault(f"emulate_npu = {emulate!r} must be true or false")
    settings = dict(
        upstream={name: raw[name] for name in ("model", "megatron_training", "actor_config", "rl_config", "generate_config") if name in raw},
        extra_arguments=dict(family.extra_arguments) if family else {},
        model_dir=model_dir, seed=seed, train_iters=train_iters, npus=npus,
        cpus_per_npu=get("rl_config", "num_cpus_for_placement_group", 8, low=1),
        cpus_for_tasks=get("rl_config", "num_cpus_for_local_task", 1, low=1),
        vllm_dp_size=infer_ep if get("generate_config", "enable_expert_parallel", False, (bool,)) else 1,
        hccl_buffer_mib=get("rl_config", "hccl_buffersize", 256, low=1),
        samples_per_prompt=get("rl_config", "n_samples_per_prompt", 1, low=1),
        max_prompt_length=get("rl_config", "max_prompt_length", 512, low=1),
        lora_targets=targets, verifiers=verifiers, aqn=aqn, gsm8k=gsm8k, eval=evaluation, run=run, emulate_npu=emulate,
        data_files=data_files,
    )
    if not isinstance(sampling.get("max_tokens"), int):
        reader.fault("generate_config.sampling_config.max_tokens is missing: upstream would stop each answer after 128 tokens")
    check_names(reader)
    if reader.faults:
        raise ConfigError("\n".join(reader.faults))
    return Settings(**settings, warnings=tuple(reader.warnings))


def _check_model(reader: Reader, model_dir: str, arguments: Mapping[str, Any]) -> Family | None:
    """The model's family; faults where the model that Megatron is told of is not the one in config.json."""
    try:
        config = read_config(Path(model_dir) / "config.json")
    except ConfigError as error:
        reader.fault(f"megatron_training.tokenizer_name_or_path = {model_dir!r}: no readable config.json of a Hugging Face model there ({error})")
        return None
    for fault in compare_with_model(arguments, config, f"{model_dir}/config.json"):
        reader.fault(fault)
    kind = config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def _check_lora(reader: Reader, training: Mapping[str, Any], mixture: bool) -> tuple[str, ...]:
    """The LoRA targets, () for none, and the faults of what does not go together with them."""
    given = reader.upstream("megatron_training", "lora_target_modules", None, (list,))
    tp = training.get("tensor_model_parallel_size")
    tp = tp if isinstance(tp, int) else 1  # check() names the fault
    if mixture:
        for key, value, why in (
            ("moe_grouped_gemm", True, "moe_tp_extend_ep needs it"),
            ("moe_permutation_async_comm", True, "moe_tp_extend_ep needs it"),
            ("moe_token_dispatcher_type", "alltoall_seq", "the only dispatcher that MindSpeed-LLM has LoRA for"),
        ):
            if arguments_of(reader.raw).get(key) != value:
                reader.fault(f"{key} = {arguments_of(reader.raw).get(key)!r} must be {value!r} for a mixture of experts: {why}")
    if not given:
        return ()
    try:
        targets = check_lora_targets(given)
    except ConfigError as error:
        reader.fault(f"megatron_training.lora_target_modules: {error}")
        return ()
    for key, why in LORA_MOE_REFUSED if mixture else ():
        if training.get(key):
            reader.fault(f"megatron_training.{key} must be left out or false with LoRA on a mixture of experts: {why}")
    if tp > 1 and training.get("lora_fusion"):
        reader.fault(f"megatron_training.lora_fusion must be left out or false with tensor_model_parallel_size = {tp}: it uses MC2 kernels")
    if not training.get("lora_ckpt_filter"):
        reader.fault("megatron_training.lora_ckpt_filter must be true with LoRA: checkpoints hold the adapters only")
    return targets


def _check_layout(reader: Reader, raw: Mapping[str, Any]) -> None:
    """Faults of layout and batch: every rule of layout/rules.py."""
    try:
        plan = read_plan(raw, shape_of_model(raw))
    except ConfigError as error:
        reader.faults += [fault for fault in str(error).splitlines() if fault not in reader.faults]
        return
    for fault in broken(plan):
        reader.fault(f"{fault.message} ({fault.source})")


def _packed_files(reader: Reader, data_path: str) -> dict[str, str]:
    """The files of an indexed dataset, by label; a fault for each that is missing."""
    files = {f"train_{column}": f"{data_path}_packed_{column}_document.bin" for column in ("input_ids", "labels")}
    for file in files.values():
        for path in (Path(file), Path(file).with_suffix(".idx")):
            if data_path and not path.is_file():
                reader.fault(f"megatron_training.data_path = {data_path!r}: no file {path}. Make it with `python tools/convert_gsm8k.py "
                             "--format mindspeed --tokenizer MODEL_DIR --input DIR_OR_HUB_NAME --output DIR`")
    return files
