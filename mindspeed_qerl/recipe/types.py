"""The Recipe: everything that a run is configured with, typed, in the field's terms.

Each part is a frozen dataclass that pydantic validates. `key(...)` names the YAML key of a field;
fields of a part with a `section` are keys of that section. `megatron.X` is X of actor_config,
megatron_training or the named model, as MindSpeed-RL merges them (config_cls/base_config.py:14).
Files, shapes and layouts are the engines' to check.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from mindspeed_qerl.aqn.targets import check_multipliers

from .features import MAX_STEPS, Correction, HardwareError, Noise, Quantization
from .fields import AS_NAMES, Count, Float, Names, NonNegative, Positive, Share, Size, key, part
from .layout import Layout

LoRATarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
LORA_TARGETS = get_args(LoRATarget)
LOSS_MODES = ("vanilla", "gspo", "cispo", "sapo")


@part()
class Model:
    """The directory that vLLM loads, and `arguments`: what Megatron is told of the model."""

    path: str = key("megatron.tokenizer_name_or_path", "", required=True)
    dtype: Literal["float32", "bfloat16"] = key("generate_config.dtype", "bfloat16")
    # base weights in Megatron's format; the local engine reads `path`'s
    load: str | None = key("megatron.load")
    arguments: Mapping[Any, Any] = Field(default_factory=dict)


@part("rl_config")
class Batch:
    """Sizes count prompts, but micro-batch sizes answers. `seq_length` and
    `max_model_len` of a config that leaves them out are the longest prompt and answer.
    """

    global_batch_size: Size = key("megatron.global_batch_size", 64, required=True)
    mini_batch_size: Size = Field(default_factory=lambda batch: batch["global_batch_size"])
    samples_per_prompt: int = key("rl_config.n_samples_per_prompt", 8, required=True, ge=2)
    micro_batch_size: Size = key("megatron.micro_batch_size", 1)
    actor_forward_micro_batch_size: Size | None = None
    ref_forward_micro_batch_size: Size | None = None
    epochs: Size = 1  # passes over the answers of one iteration
    guarantee_order: bool = True
    seq_length: Size = key("megatron.seq_length", 2560)
    max_model_len: Size = key("generate_config.max_model_len", 2560)
    max_num_batched_tokens: Size = key("generate_config.max_num_batched_tokens", 8192)
    use_remove_padding: bool = False
    use_dynamic_bsz: bool = False
    # tokens of a micro-batch of dynamic size
    update_max_packing_token_size: Size = 4096
    actor_max_packing_token_size: Size = 4096
    ref_max_packing_token_size: Size = 4096
    reset_attention_mask: bool = key("megatron.reset_attention_mask", False)
    no_pad_to_seq_lengths: bool = key("megatron.no_pad_to_seq_lengths", False)

    @property
    def answers(self) -> int:
        """Answers of one iteration."""
        return self.global_batch_size * self.samples_per_prompt

    @property
    def mini_answers(self) -> int:
        """Answers of one update (upstream multiplies mini_batch_size, rl_config.py:256)."""
        return self.mini_batch_size * self.samples_per_prompt

    @property
    def actor_forward(self) -> int:
        """Answers in one forward pass for the policy's log-probs."""
        return self.actor_forward_micro_batch_size or self.micro_batch_size

    @property
    def ref_forward(self) -> int:
        """Answers in one forward pass for the reference's log-probs."""
        return self.ref_forward_micro_batch_size or self.micro_batch_size

    @property
    def update_tokens(self) -> int:
        """Tokens of an update's micro-batch, at most."""
        if self.use_dynamic_bsz:
            return self.update_max_packing_token_size
        return self.micro_batch_size * self.seq_length

    @property
    def forward_tokens(self) -> int:
        """Tokens of a forward pass for log-probs, at most."""
        if self.use_dynamic_bsz:
            return max(self.actor_max_packing_token_size, self.ref_max_packing_token_size)
        return max(self.actor_forward, self.ref_forward) * self.seq_length


@part("algorithm")
class Algorithm:
    """GRPO and what varies it (docs/algorithms.md): MindSpeed-RL's names where it has them, else
    verl's or TRL's.
    """

    adv_estimator: Literal["group_norm", "rloo"] = key("rl_config.adv_estimator", "group_norm")
    norm_adv_by_std_in_grpo: bool = True
    loss_mode: str = "vanilla"  # of LOSS_MODES, or your own, module:function
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    # of seq-mean-token-sum-norm; None: sampling max_tokens
    loss_scale_factor: Positive | None = None
    mask_truncated_completions: bool = False  # TRL's: answers that were cut off are not trained
    clip_higher_enable: bool = key("rl_config.clip_higher_enable", False)
    clip_ratio: NonNegative = key("rl_config.clip_ratio", 0.2)
    # DAPO's: ratio in [1 - low, 1 + high]
    clip_ratio_low: NonNegative = key("rl_config.clip_ratio_low", 0.2)
    clip_ratio_high: NonNegative = key("rl_config.clip_ratio_high", 0.28)
    # of vanilla and gspo the dual clip, None: off
    clip_ratio_c: Float | None = Field(None, gt=1)
    tau_pos: Positive = 1.0  # SAPO's
    tau_neg: Positive = 1.05
    kl_coefficient: NonNegative = key("rl_config.init_kl_coef", 0.01)
    kl_penalty: Literal["low_var_kl", "kl", "abs", "mse"] = key(
        "rl_config.kl_penalty", "low_var_kl"
    )
    use_kl_in_reward: bool = key("rl_config.use_kl_in_reward", False)  # else it is in the loss
    log_kl: bool = False  # loss/kl also where its coefficient is 0, for a pass of the reference
    entropy_coefficient: NonNegative = key("rl_config.entropy_coeff", 0.0)
    # the experts that training goes to: its own choice, or the rollout's (R3)
    routing_replay: Literal["none", "rollout"] = "none"

    @property
    def clip_low(self) -> float:
        return self.clip_ratio_low if self.clip_higher_enable else self.clip_ratio

    @property
    def clip_high(self) -> float:
        return self.clip_ratio_high if self.clip_higher_enable else self.clip_ratio

    @property
    def loss_kl_coefficient(self) -> float:
        """Returns the coefficient of the KL term in the loss: 0 where KL is in the reward."""
        return 0.0 if self.use_kl_in_reward else self.kl_coefficient

    @property
    def loss_has_kl(self) -> bool:
        """True if the loss compares the policy with its reference, to train it or to log it."""
        return self.loss_kl_coefficient > 0 or self.log_kl

    @property
    def needs_reference(self) -> bool:
        """True if the reference computes log-probs."""
        return self.loss_has_kl or self.use_kl_in_reward


@part("rl_config")
class Selection:
    """Which groups are trained, and what length costs: DAPO's dynamic sampling and overlong
    shaping. Of a config that leaves them out, `filter_groups_train_batch_size` is the global batch
    and `rollout_max_tokens` sampling max_tokens.
    """

    filter_groups_enable: bool = False
    filter_groups_metric: str | None = None  # a verifier; None: the whole reward
    # 0 or less: no limit, on the local engine only
    filter_groups_max_batches: int = 1
    filter_groups_train_batch_size: Size = 1  # prompts trained a step
    overlong_buffer_enable: bool = False
    overlong_buffer: Count = 0  # tokens before rollout_max_tokens that cost
    overlong_buffer_penalty_factor: NonNegative = 1.0
    rollout_max_tokens: Size = 128


@part("megatron")
class Optimizer:
    """AdamW and its learning rate; what is kept and what is computed again for a gradient."""

    lr: Positive = key("megatron.lr", 1e-6, required=True)
    min_lr: NonNegative = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_fraction: Float = Field(0.0, ge=0, le=0.99)
    weight_decay: NonNegative = 0.01
    adam_beta1: Float = Field(0.9, ge=0, le=0.999999)
    adam_beta2: Float = Field(0.999, ge=0, le=0.999999)
    clip_grad: NonNegative = 1.0
    distributed: bool = key("megatron.use_distributed_optimizer", False)
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["block", "uniform"] | None = None
    recompute_num_layers: Size | None = None  # of each pipeline stage; None: all


@part()
class Sampling:
    """Describes how training answers are sampled: from the whole distribution, without top_p."""

    max_tokens: Size = key("sampling_config.max_tokens", 128, required=True)
    temperature: Positive = key("sampling_config.temperature", 1.0)
    # tokens; rows with longer prompts are left out
    max_prompt_length: Size = key("rl_config.max_prompt_length", 512)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer."""
        return self.max_prompt_length + self.max_tokens


@part("generate_config")
class Rollout:
    """The vLLM engine, and what leaves the NPU while it samples."""

    max_num_seqs: Size = 256
    enforce_eager: bool = True
    gpu_memory_utilization: Float = Field(0.5, gt=0, le=1)
    offload_train_param: bool = False
    offload_train_grad: bool = False
    offload_train_optimizer: bool = False


@part()
class LoRA:
    """Adapters; no targets: every weight is trained (the NPU engine only)."""

    r: Size = key("megatron.lora_r", 8)
    alpha: Positive = key("megatron.lora_alpha", 16)
    targets: Annotated[tuple[LoRATarget, ...], AS_NAMES] = key("megatron.lora_target_modules", ())


@part("task")
class Task:
    """Rows with prompts and gold answers; whether there is such a reward is the task's to say
    (tasks/rewards.py).
    """

    train_file: str = ""
    test_file: str = ""
    prompt: Literal["chat", "plain"] = "chat"
    # variables of the chat template, as TRL calls them: {"enable_thinking": false}
    chat_template_kwargs: Mapping[str, Any] | None = None
    allow_overlap: bool = False  # test questions among the training questions
    # the packed training rows that upstream's trainer reads
    data_path: str = key("megatron.data_path", "")
    verifier_function: Names = key("rl_config.verifier_function", ("gsm8k",))
    verifier_weight: Annotated[tuple[Float, ...], AS_NAMES] = key(
        "rl_config.verifier_weight",
        default_factory=lambda task: (1.0,) * len(task["verifier_function"]),
    )

    @property
    def verifiers(self) -> tuple[tuple[str, float], ...]:
        """(name or module:function, weight) of each reward."""
        names = self.verifier_function
        return tuple(zip(names, self.verifier_weight + (1.0,) * len(names)))


@part("eval")
class Evaluation:
    """Noise off, before the first step, every `every` steps and after the last; n_problems None:
    the whole file.
    """

    every: Size = 10
    n_problems: Size | None = None
    samples_per_problem: Size = 1
    temperature: NonNegative = 1.0  # 0: greedy


@part("run")
class Run:
    """`resume` is the directory of a run that stopped, or "auto": the newest one of this config, if
    there is one.
    """

    emulate_npu: bool = key("emulate_npu", False)
    train_iters: int = key("megatron.train_iters", 1, required=True, ge=1, le=MAX_STEPS)
    # steps; there is always one after the last
    save_interval: Size | None = key("megatron.save_interval")
    seed: Count = key("megatron.seed", 1)
    root: str = "runs"
    name: str | None = None
    resume: str | None = None
    tensorboard: bool = True
    wandb_project: str | None = None
    rollout_samples: Count = 8
    # steps from one proof that the adapters are in the rollout engine to the next
    prove_every: Size = 50
    # the least share of LoRA's update that a proof must find in the rollout engine; 0: any
    min_arrived: Share = 0.9
    accepted_checks: Names = ()  # checks of the preflight that may fail (docs/troubleshooting.md)


@part("local")
class Local:
    """The local engine: vLLM's keys and values, GiB; checkpoints kept."""

    kv_cache_gib: Size = 1
    keep_checkpoints: Size = 2


@part("npu")
class Npu:
    """Describes what the NPU engine asks of Ray and HCCL, and how long, in seconds, a rank waits
    for one that shares its answers.
    """

    peer_timeout: Size = 600
    cpus_per_npu: Size = key("rl_config.num_cpus_for_placement_group", 8)
    cpus_for_tasks: Size = key("rl_config.num_cpus_for_local_task", 1)
    hccl_buffer_mib: Size = key("rl_config.hccl_buffersize", 256)
    enable_prefix_caching: bool = key("generate_config.enable_prefix_caching", False)
    share_backbone: bool = key("rl_config.share_backbone", False)
    lora_ckpt_filter: bool = key("megatron.lora_ckpt_filter", False)
    no_save_optim: bool = key("megatron.no_save_optim", False)
    padded_vocab_size: Size | None = key("megatron.padded_vocab_size")


@part("rehearsal")
class Rehearsal:
    """Try a config for NPUs here (docs/ascend.md): a narrow model made below `models`; the
    fewest `layers` are one on each stage.
    """

    enabled: bool = False
    steps: Size = 2
    layers: Literal["fewest", "all"] = "fewest"
    max_tokens: Size = 8
    eval_problems: Size = 8
    models: str = "models/rehearsal"


@part()
class Recipe:
    """One run. `upstream` has the sections rl_config and generate_config as they were read, since
    upstream knows more of their keys than the parts do.
    """

    engine: str
    model: Model
    layout: Layout
    batch: Batch
    algorithm: Algorithm
    selection: Selection
    optimizer: Optimizer
    sampling: Sampling
    rollout: Rollout
    lora: LoRA
    noise: Noise
    correction: Correction
    quantization: Quantization
    hardware_error: HardwareError
    task: Task
    evaluation: Evaluation
    run: Run
    local: Local
    npu: Npu
    rehearsal: Rehearsal
    upstream: Mapping[str, Mapping[Any, Any]] = Field(default_factory=dict, repr=False)

    @property
    def noise_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of `NoiseInjector`, besides the model; None without noise."""
        noise = self.noise
        if not noise.enabled:
            return None
        return {
            "targets": noise.targets,
            "exclude": noise.exclude,
            "multipliers": check_multipliers(noise.multipliers or {}),
            "seed": self.run.seed if noise.seed is None else noise.seed,
            "draws": noise.draws,
        }

    @property
    def emulate_npu(self) -> bool:
        """True if the NPU engine runs on CPUs (emulation/)."""
        return self.run.emulate_npu


PARTS: dict[str, Any] = {
    field.name: field.type for field in fields(Recipe) if hasattr(field.type, "__pydantic_fields__")
}
