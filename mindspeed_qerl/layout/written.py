"""Configs for NPUs as text: of a plan with its memory what configs/base/npu.yaml leaves open, each
value with where it comes from; and the part of configs/model/ of a model that has none.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_qerl.families import ModelShape, family_of

from .memory import Memory
from .parts import GB
from .plan import VLLM_VOCABULARY_MULTIPLE
from .planner import EVALUATED, dispatched
from .time import Terms, iteration, total

PROMPT = 512  # tokens at most, as configs/base/npu.yaml has it
RANK_CPUS = 4  # rl_config.num_cpus_for_placement_group of configs/base/npu.yaml
OTHER_CPUS = 12  # of the transfer dock, the driver and a reward (ascend/limits.py:needed_cpus)
COLUMN = 33  # where comments begin
CHUNK = 8192  # max_num_batched_tokens of configs/base/npu.yaml
# A line whose value is None, and a section without lines, are left out.
CONFIG = """\
# {wanted.title} on {layout.world} dies, {layout.nodes} x {layout.node_width}: \
TP {layout.tp}, PP {layout.pp}, EP {layout.ep}, DP {layout.dp}; \
vLLM {layout.infer_tp} x {layout.infer_ep}. By tools/plan_layout.py.
# At most {peak:.0f} of {capacity:.0f} GB outside a rollout, \
{seconds} s an iteration: computed, never measured.
defaults:
  - base: npu
  - model: {wanted.part}
  - _self_

megatron_training:
  train_iters: {steps}  # {steps} x {batch.global_batch_size} prompts: once through \
{wanted.rows:,} rows
  global_batch_size: {batch.global_batch_size}  # dealt to DP {layout.dp}, \
vLLM replicas: {layout.infer_dp}, nodes: {layout.nodes}
  seq_length: {seq_length}  # prompt and answer
  data_path: {wanted.data_path}  # tools/pack_task.py --data-path
  sequence_parallel: {sequence_parallel}  # TP above 1
  recompute_granularity: {granularity}  # {peak:.0f} GB; kept activations do not fit, or cost as much
  recompute_method: {method}
  recompute_num_layers: {recomputed}  # all of a stage's

actor_config:
  tensor_model_parallel_size: {layout.tp}  # {heads} heads, {kv_heads} KV heads a rank
  pipeline_model_parallel_size: {layout.pp}  # {layers} layers a stage
  expert_model_parallel_size: {ep}  # {experts} experts a rank, each on {layout.expert_dp} ranks

rl_config:
  actor_resource:
    num_npus: {layout.world}  # dies; {layout.world} x {rank_cpus} + {other_cpus} = {cpus} logical CPUs
  hccl_buffersize: {buffer}  # MiB; CANN asks for {asked:.0f} for {settings.max_num_seqs} \
sequences at once
  update_max_packing_token_size: {batch.update_max_packing_token_size}  # {plan.share} answers of a \
rank are {rows:.0f} rows
  max_prompt_length: {wanted.prompt}  # tokens; longer prompts are left out

generate_config:
  infer_tensor_parallel_size: {layout.infer_tp}  # {layout.infer_dp} replicas
  infer_expert_parallel_size: {infer_ep}  # {infer_experts} experts a die, {groups} vLLM groups
  enforce_eager: {eager}  # decode graphs would keep too much on the die
  offload_train_optimizer: {eager}  # to the host while vLLM runs: no GB to spare
  offload_train_grad: {eager}
  offload_train_param: {eager}
  gpu_memory_utilization: {settings.gpu_memory_utilization:g}  # KV cache of {kv_cache:.1f} GB: \
{memory.answers_at_once} whole answers at once
  max_num_seqs: {settings.max_num_seqs}  # {memory.answers_needed} in a rollout, {evaluated} in an \
evaluation
  max_num_batched_tokens: {chunk}  # a whole answer
  sampling_config: {sampling}

npu:
  ranks_per_node: {node_width}  # dies of each

task:
  train_file: {wanted.train_file}  # test_file and reward: yours, too
"""
MODEL = """\
# @package _global_
# {title}, of its config.json, by tools/plan_layout.py.
model:
  {part}:
{arguments}\
    make_vocab_size_divisible_by: 1
    attention_softmax_in_fp32: true
    no_gradient_accumulation_fusion: true
    moe_aux_loss_coeff: {no_loss}
    moe_grouped_gemm: {moe}
    moe_permutation_async_comm: {moe}
    moe_token_dispatcher_type: {dispatcher}

megatron_training:
  model: {part}
  tokenizer_name_or_path: {path}
  data_path: ${{oc.env:DATA,data}}/gsm8k/{name}/gsm8k_train
  seq_length: {length}  # prompt and answer
  recompute_granularity: {granularity}  # each layer is computed again for its gradient
  recompute_method: {method}  # uniform: no gradient with LoRA (MindSpeed-LLM training/training.py:168)
  recompute_num_layers: {recomputed}

actor_config:
  model: {part}
  moe_tp_extend_ep: {moe}  # the weight sync knows experts in no other form
  load: ${{megatron_training.tokenizer_name_or_path}}\
-tp${{actor_config.tensor_model_parallel_size}}-pp${{actor_config.pipeline_model_parallel_size}}{ranks}

generate_config:
  enable_expert_parallel: {moe}
  sampling_config:
    max_tokens: {answer}
"""


@dataclass(frozen=True)
class Wanted:
    """Describes a config beside its plan: `rows` of the training file; what is None is the model's
    or the base's.
    """

    title: str  # of the model
    part: str  # its file in configs/model/
    rows: int
    prompt: int | None = None  # tokens at most
    answer: int | None = None
    train_file: str | None = None
    data_path: str | None = None


def config_text(memory: Memory, wanted: Wanted, terms: Terms) -> str:
    """The text of a config for a plan that fits."""
    plan = memory.plan
    shape = plan.shape
    layout = plan.layout
    batch = plan.batch
    settings = memory.settings
    layers = max(plan.layers)
    moe = shape.moe
    tokens = plan.share * (terms.prompt + terms.answer)
    recomputes = settings.recompute_layers >= layers
    by_plan = recomputes and not moe  # configs/model/ has it where there are experts
    chunk = batch.max_num_batched_tokens
    values = dict(
        wanted=wanted,
        memory=memory,
        plan=plan,
        layout=layout,
        batch=batch,
        settings=settings,
        peak=memory.peak / GB,
        capacity=memory.capacity / GB,
        seconds="-".join(f"{value:.0f}" for value in total(iteration(memory, terms))),
        steps=max(wanted.rows // batch.global_batch_size, 1),
        seq_length=batch.seq_length if wanted.prompt or wanted.answer else None,
        sequence_parallel=_if(layout.tp > 1),
        granularity=_if(by_plan, "full"),
        method=_if(by_plan, "block"),
        recomputed=_if(recomputes and (layout.pp > 1 or by_plan), layers),
        heads=shape.num_attention_heads // layout.tp,
        kv_heads=shape.num_key_value_heads // layout.tp,
        layers=layers,
        ep=_if(moe, layout.ep),
        experts=shape.num_experts // layout.expert_ranks,
        rank_cpus=RANK_CPUS,
        other_cpus=OTHER_CPUS,
        cpus=layout.world * RANK_CPUS + OTHER_CPUS,
        buffer=_if(moe, settings.hccl_buffer_mib),
        asked=dispatched(shape, settings.max_num_seqs),
        rows=-(-tokens // batch.update_max_packing_token_size),
        infer_ep=_if(moe, layout.infer_ep),
        infer_experts=shape.num_experts // layout.infer_expert_ranks,
        groups=layout.world // layout.infer_expert_ranks,
        eager=_if(settings.enforce_eager),
        kv_cache=memory.kv_cache / GB,
        evaluated=-(-EVALUATED // layout.infer_dp),
        chunk=_if(chunk > CHUNK, chunk),
        sampling=_if(bool(wanted.answer), f"\n    max_tokens: {wanted.answer}"),
        node_width=_if(layout.nodes > 1, layout.node_width),
    )
    return _filled(CONFIG.format(**values))


def model_text(shape: ModelShape, part: str, title: str, path: str, answer: int) -> str:
    """The text of a model's part: what Megatron is told of it, its files, and lengths of 512 tokens
    of a prompt and `answer` of an answer.
    """
    rows = -(-shape.vocab_size // VLLM_VOCABULARY_MULTIPLE) * VLLM_VOCABULARY_MULTIPLE
    sizes = {"max_position_embeddings": shape.max_position_embeddings, "padded_vocab_size": rows}
    told = family_of(shape).megatron_arguments(shape) | sizes
    arguments = ""
    for key, value in told.items():
        if value is not None and value is not False and not key.endswith("_dropout"):
            text = value if isinstance(value, str) else json.dumps(value)
            arguments += f"    {key}: {text}\n"
    moe = shape.moe
    values = dict(
        title=title,
        part=part,
        arguments=arguments,
        no_loss=_if(moe, "0.0"),
        moe=_if(moe),
        dispatcher=_if(moe, "alltoall_seq"),
        path=path,
        name=Path(path).name,
        length=PROMPT + answer,
        granularity=_if(moe, "full"),
        method=_if(moe, "block"),
        recomputed=_if(moe, shape.num_hidden_layers),
        ranks="-ep${actor_config.expert_model_parallel_size}" if moe else "",
        answer=answer,
    )
    return _filled(MODEL.format(**values))


def _if(condition: bool, value: Any = "true") -> Any:
    return value if condition else None


def _filled(text: str) -> str:
    """The text without lines of a value None and sections of which nothing is left; comments in one
    column.
    """
    sections = []
    for section in text.split("\n\n"):
        lines = []
        for line in section.splitlines():
            setting, _, why = line.partition("  # ")
            if not setting.endswith(": None"):
                lines.append(f"{setting:{COLUMN}}  # {why}" if why else setting.rstrip())
        if len(lines) > 1:
            sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
