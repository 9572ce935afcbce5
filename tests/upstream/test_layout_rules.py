"""The layout rules against upstream itself: the lines that they cite, and upstream's own checks run
on thousands of plans.
"""

import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import ROOT, emulated, run_python

from mindspeed_qerl.families import NAMED_SHAPES
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.planner import new_plan
from mindspeed_qerl.layout.rules import RULES, TRAINING, broken
from mindspeed_qerl.recipe.types import Batch, Layout

FROM_VALIDATE_RL_ARGS = {rule.name for rule in RULES if "validate_config.py:" in rule.source}
FROM_CONTAINER = {
    "infer_groups_hold_whole_training_groups",
    "tensor_parallel_sizes_divide",
    "stages_hold_whole_infer_tp_groups",
    "layers_by_pp",
}
# Rules of training that Megatron's arguments, its model's config and its groups say nothing of: for
# which plans (None: all), and who does, or what would come of it.
UNSEEN = {
    "ranks_fill_nodes": (
        None,
        "upstream's launcher deals as many actors to each node, and waits for ever",
    ),
    "width_by_tp": (None, "the linear layers, when they are built"),
    "vocabulary_by_tp": (None, "the embedding, when it is built"),
    "vocabulary_is_vllms": (None, "the weight sync, when it puts Megatron's rows into vLLM's"),
    "shared_backbone_has_adapters": (None, "validate_rl_args"),
    "experts_need_sequence_parallelism": (
        lambda plan: plan.layout.ep == 1,
        "the layers with experts, when they run",
    ),
    "dispatcher_has_ranks": (None, "the dispatcher, in the first forward pass: UnboundLocalError"),
}
LINES = json.loads(
    (Path(__file__).parent / "rule_lines.json").read_text()
)  # rule -> the line that it cites


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_cites_a_line_that_is_there(rule, upstream):
    repository, path, line = re.split("[ :]", rule.source)
    root = upstream / repository
    if repository == "vllm":
        root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
    assert (root / path).read_text().splitlines()[int(line) - 1].strip() == LINES[rule.name]


def sampled(draw: random.Random) -> Plan:
    """Plans that upstream's checks say yes and no to."""
    shape = NAMED_SHAPES[draw.choice(["qwen3_30b_a3b", "qwen25_7b"])]
    world = draw.choice([4, 8, 12, 16])
    tp, pp, infer_tp = (draw.choice([1, 1, 1, 2, 2, 3, 4]) for _ in range(3))
    n, prompts = draw.choice([2, 4, 8]), draw.choice([12, 16, 24, 32, 48, 60, 64, 96])
    batch = Batch(
        prompts,
        draw.choice([prompts, prompts // 2 or 1]),
        n,
        draw.choice([1, 1, 2, 3]),
        guarantee_order=False,
        seq_length=draw.choice([512, 1024]),
        max_model_len=draw.choice([1024, 1024, 768]),
        max_num_batched_tokens=8192,
        use_remove_padding=draw.random() < 0.1,
        reset_attention_mask=draw.random() < 0.5,
        no_pad_to_seq_lengths=draw.random() < 0.5,
    )
    layout = Layout(
        world,
        tp=tp,
        pp=pp,
        ep=draw.choice([1, 2, 4]) if shape.moe else 1,
        infer_tp=infer_tp,
        infer_ep=draw.choice([1, 2, 4]) if shape.moe else 1,
        ranks_per_node=draw.choice([16, 4]),
    )
    return replace(
        new_plan(shape, layout, batch), share_backbone=draw.random() < 0.5, lora=draw.random() < 0.9
    )


def ask(program: str, plans: Iterable[dict], upstream: Path, folder: Path) -> list[str]:
    """What upstream says to each plan: "" for yes, else its error."""
    (folder / "plans.json").write_text(json.dumps(list(plans)))
    words = ["-c", program, folder / "plans.json", folder / "said.json"]
    result = run_python(words, emulated(upstream, 16), folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "said.json").read_text())


def plain(plan: Plan) -> dict:
    it = plan.layout
    return {
        **vars(it),
        "nodes": it.nodes,
        **vars(plan.batch),
        "lora": plan.lora,
        "share_backbone": plan.share_backbone,
        "layers": plan.shape.num_hidden_layers,
        "experts": plan.shape.num_experts,
    }


def compare(plans: list[Plan], said: list[str], names: set[str]) -> None:
    verdicts = {True: 0, False: 0}
    for plan, error in zip(plans, said, strict=True):
        faults = [fault for fault in broken(plan) if fault.rule in names]
        assert (not error) == (not faults), (plan, error, faults)
        verdicts[not error] += 1
    assert min(verdicts.values()) > 100, verdicts


def test_validate_rl_args_agrees(upstream, tmp_path):
    """MindSpeed-RL's validate_rl_args says no exactly where a rule that cites it is broken."""
    program = """
import json, sys
from types import SimpleNamespace as Of
from mindspeed_rl.config_cls import validate_config
from mindspeed_rl.config_cls.rl_config import RLConfig
from mindspeed_rl.config_cls.generate_config import GenerateConfig
from mindspeed_rl.config_cls.megatron_config import MegatronConfig
said = []
blank = (RLConfig({"actor_resource": {"num_npus": 1}}), GenerateConfig({"dtype": "bfloat16"}),
         MegatronConfig({"model": "m", "bf16": True}, {"m": {}}))
for p in json.load(open(sys.argv[1])):
    validate_config.get_node_nums = lambda: p["nodes"]
    rl, generate, actor = (Of(**vars(config)) for config in blank)
    for key in ("n_samples_per_prompt", "use_remove_padding", "share_backbone", "guarantee_order"):
        setattr(rl, key, p[key if key in p else "samples_per_prompt"])
    rl.actor_resource, rl.verifier_weight = Of(num_npus=p["world"]), [1.0]
    rl.mini_batch_size = p["mini_batch_size"] * p["samples_per_prompt"]
    vars(generate).update(infer_tensor_parallel_size=p["infer_tp"], max_model_len=p["max_model_len"])
    vars(actor).update(tensor_model_parallel_size=p["tp"], pipeline_model_parallel_size=p["pp"],
                       stage="ray_grpo",
                       lora_target_modules=["linear_qkv"] if p["lora"] else None,
                       **{key: p[key] for key in ("seq_length", "global_batch_size", "micro_batch_size",
                                                "reset_attention_mask", "no_pad_to_seq_lengths")})
    try:
        validate_config.validate_rl_args(actor, actor, actor, rl, generate)
        said.append("")
    except (ValueError, ZeroDivisionError) as error:
        said.append(repr(error))
json.dump(said, open(sys.argv[2], "w"))
"""
    draw = random.Random(1)
    plans = [sampled(draw) for _ in range(3000)]
    said = ask(program, map(plain, plans), upstream, tmp_path)
    compare(plans, said, FROM_VALIDATE_RL_ARGS)


def test_weight_container_agrees(upstream, tmp_path):
    """The container's _validate_parallel_config, its TP groups and its layer list say no exactly
    where a rule that cites them is broken.
    """
    program = """
import json, sys
from types import SimpleNamespace as Of
import torch.distributed
from mindspeed_rl.workers.resharding import vllm_weight_container as module
from mindspeed_rl.workers.resharding.vllm_weight_container import MegatronStyleVllmWeightContainer as Container
module.new_group = lambda ranks: None
said = []
for p in json.load(open(sys.argv[1])):
    ep = p["tp"] * p["ep"] if p["experts"] else p["ep"]
    it = Of(_infer_pp_size=1, _infer_ep_size=p["infer_ep"] * p["infer_tp"], _ep_size=ep,
            moe_tp_extend_ep=bool(p["experts"]), _pp_size=p["pp"], _tp_size=p["tp"], _infer_tp_size=p["infer_tp"],
            _world_size=p["world"],
            _num_hidden_layers=p["layers"], _rank=-1,
            parallel_state=Of(get_tensor_model_parallel_group=lambda: None))
    module.mindspeed_rl.workers.resharding.utils._TP_GROUP = None
    module.mindspeed_rl.workers.resharding.utils._TP_ALLGATHER_GROUP = None
    try:
        Container._build_num_layer_list(it, None)
        Container._validate_parallel_config(it)
        Container._init_tensor_model_parallel_allgather_group(it)
        Container._init_tensor_model_parallel_split_group(it)
        said.append("")
    except ValueError as error:
        said.append(repr(error))
json.dump(said, open(sys.argv[2], "w"))
"""
    draw = random.Random(2)
    plans = [
        plan
        for plan in (sampled(draw) for _ in range(3000))
        if plan.layout.world % (plan.layout.tp * plan.layout.pp) == 0
    ]
    compare(plans, ask(program, map(plain, plans), upstream, tmp_path), FROM_CONTAINER)


def trained(draw: random.Random) -> Plan:
    """Plans whose training side Megatron says yes and no to: odd numbers of heads, layers and
    experts, lists of layers.
    """
    shape = NAMED_SHAPES[draw.choice(["qwen3_30b_a3b", "qwen15_moe_a2_7b", "qwen25_7b"])]
    heads, layers = draw.choice([4, 8, 12, 16, 24, 28, 32]), draw.choice([4, 6, 8, 12, 24, 28, 30])
    shape = replace(
        shape,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=draw.choice(
            [size for size in (1, 2, 3, 4, 6, 8, heads) if not heads % size]
        ),
        num_experts=draw.choice([4, 8, 12, 60, 64, 128]) if shape.moe else 0,
        num_experts_per_tok=4 if shape.moe else 0,
        vocab_size=draw.choice([1000, 151_936, 152_064]),
    )
    tp, pp = (draw.choice([1, 1, 1, 2, 2, 3, 4, 8]) for _ in range(2))
    ep = draw.choice([1, 1, 2, 3, 4, 8]) if shape.moe or draw.random() < 0.1 else 1
    filled = tp * pp * draw.choice([1, 1, 2, 3, 4]) * draw.choice([1, ep])
    stages = draw.choice([pp, pp, pp, pp, 3])
    given = draw.random() < 0.15 and stages <= layers
    layout = Layout(
        draw.choice([filled, filled, filled, 1, 6, 12, 16, 24]),
        tp=tp,
        pp=pp,
        ep=ep,
        num_layer_list=(layers // stages,) * (stages - 1)
        + (layers // stages + draw.choice([0, layers % stages]),)
        if given
        else (),
        sequence_parallel=draw.random() < (0.9 if shape.moe and tp > 1 else 0.4),
    )
    batch = Batch(
        draw.choice([12, 24, 60, 64]),
        micro_batch_size=draw.choice([1, 1, 2, 3]),
        seq_length=draw.choice([512, 1000, 1002, 1022, 1024]),
        reset_attention_mask=draw.random() < 0.3,
        no_pad_to_seq_lengths=draw.random() < 0.5,
    )
    lora = draw.random() < 0.7
    plan = Plan(
        shape, layout, batch, lora=lora, share_backbone=draw.random() < (0.5 if lora else 0.1)
    )
    return replace(
        plan,
        padded_vocab_size=draw.choice([None, None, plan.rows, plan.rows + 64, shape.vocab_size]),
    )


def arguments(plan: Plan) -> dict:
    """The plan in Megatron's arguments."""
    it, shape, batch = plan.layout, plan.shape, plan.batch
    experts = {
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
    }
    return {
        "rank": 1,  # prints less
        "world_size": it.world,
        "tensor_model_parallel_size": it.tp,
        "pipeline_model_parallel_size": it.pp,
        "expert_model_parallel_size": it.ep,
        "moe_tp_extend_ep": plan.shape.moe,
        "sequence_parallel": it.sequence_parallel,
        "num_layer_list": ",".join(map(str, it.num_layer_list)) or None,
        "num_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_key_value_heads,
        "kv_channels": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size or 6144,
        "num_experts": shape.num_experts or None,
        **(experts if shape.moe else {}),
        "padded_vocab_size": plan.rows,
        "vocab_size": shape.vocab_size,
        **{
            key: getattr(batch, key)
            for key in (
                "seq_length",
                "micro_batch_size",
                "global_batch_size",
                "reset_attention_mask",
                "no_pad_to_seq_lengths",
            )
        },
        "variable_seq_lengths": True,
        "lora_target_modules": ["linear_qkv"] if plan.lora else [],
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "tokenizer_name_or_path": ".",
    }


def is_unseen(rule: str, plan: Plan) -> bool:
    only, _ = UNSEEN.get(rule, (lambda plan: False, ""))
    return only is None or only(plan)


def test_megatron_agrees(upstream, tmp_path):
    """validate_args as MindSpeed and MindSpeed-LLM have it, the model's config and Megatron's
    groups say no exactly where a rule of training is broken that is not UNSEEN; and each of those
    is broken by plans that they accept.
    """
    program = (
        f"""
ROOT, CONFIGS = {str(upstream / "MindSpeed-RL")!r}, {str(ROOT / "configs")!r}
"""
        + """
import contextlib, copy, io, json, sys, traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import torch
from hydra import compose, initialize_config_dir
from mindspeed_rl.config_cls import validate_config
plans, answers = sys.argv[1:]
spec = spec_from_file_location("upstream_cli", Path(ROOT) / "cli" / "train_grpo.py")
cli = module_from_spec(spec)
spec.loader.exec_module(cli)
validate_config.get_node_nums = lambda: 1
blank = []
for name in ("grpo_qwen25_7b_gsm8k_8npu", "grpo_qwen3_30b_a3b_gsm8k_16npu"):
    with initialize_config_dir(CONFIGS, version_base=None):
        actor = cli.parse_training_config(compose(name))["actor_config"]
    sys.argv = sys.argv[:1]
    cli.parse_args_from_config(actor)
    from mindspeed_llm.training.arguments import core_transformer_config_from_args_wrapper  # patches Megatron
    import megatron
    blank.append(megatron.training.arguments.parse_args())
from megatron.core import parallel_state
from megatron.training import global_vars
from megatron.training.arguments import core_transformer_config_from_args, validate_args

class Groups(Exception):
    "The first group is made: all checks of the ranks are done."

def new_group(*arguments, **keywords):
    raise Groups

torch.distributed.is_initialized, torch.distributed.get_rank = lambda: True, lambda: 0
torch.distributed.new_group = parallel_state.create_group = new_group

def check(plan):
    args = copy.copy(blank[bool(plan["num_experts"])])
    vars(args).update(plan)
    global_vars._GLOBAL_ARGS = args
    torch.distributed.get_world_size = lambda *group: args.world_size
    validate_args(args, {})
    config = core_transformer_config_from_args
    if args.num_layer_list:  # where a process is started with one, features_manager/pipeline_parallel does this
        config = core_transformer_config_from_args_wrapper(config)
    config(args)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size, context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size)
    except Groups:
        parallel_state.destroy_model_parallel()

said = []
for plan in json.load(open(plans)):
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            check(plan)
        said.append("")
    except (AssertionError, RuntimeError, ValueError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said.append(f"{Path(frame.filename).name}:{frame.lineno} {error!r:.300}")
json.dump(said, open(answers, "w"))
"""
    )
    draw = random.Random(3)
    plans = [trained(draw) for _ in range(1000)]
    said = ask(program, map(arguments, plans), upstream, tmp_path)
    verdicts, unseen = Counter(), Counter()
    for plan, error in zip(plans, said, strict=True):
        faults = {fault.rule for fault in broken(plan, TRAINING)}
        assert bool(error) == any(not is_unseen(rule, plan) for rule in faults), (
            plan,
            error,
            faults,
        )
        verdicts["refused" if error else "refused by us only" if faults else "accepted"] += 1
        unseen.update(faults if not error else ())
    print(dict(verdicts), dict(unseen))
    assert min(verdicts.values()) > 50 and unseen.keys() == UNSEEN.keys()
