"""How long an iteration takes, phase by phase, on dies of a given kind. Computed from sizes, and
from launches that were counted on emulated NPUs (launches.yaml); never measured on an NPU.

Kernels are launched one by one, but for decode graphs: a phase takes what the host needs to launch
them, or what the die needs to compute, read and send, whichever is more. What a launch costs the
host is not published for a 910C, and is a range.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import yaml

from mindspeed_qerl.families import ModelShape

from .memory import Memory
from .parts import BF16, adapted_weights, size_of, trained
from .plan import Plan
from .sizes import LARGEST, rollout_weights, training_weights

# What a die has, and the share of it that is reached: Ascend/msmodeling 84fec85
# tensor_cast/device.py; training's share: arXiv 2505.04519, and at least what 235B-A22B's published
# update had (docs/layouts.md); latency: an all-reduce of 160 KB on 16 dies.
FLOPS = 353.9e12  # bfloat16, dense, a second
SHARES = {"training": 0.3, "rollout": 0.7}
LEAST_SHARE = 0.14  # of training
KERNEL = 3e-6  # seconds of the die that a kernel of a decode step takes, however little it does
READ = 0.6 * 1.6 * 2**40  # bytes a second of its memory
NETWORK = 196e9  # bytes a second to other dies of the box
NETWORK_SHARE = 0.7
COPIED = (8e9, 2e9)  # bytes a second from and to the host's pageable memory; assumed
LATENCY = 15e-6  # seconds of a collective, however small
# kind of hardware -> bytes a second to the dies of another box
HARDWARE = {
    "910C": 24.5e9,  # boxes joined by RoCE
    "910C-supernode": NETWORK,
    "910B": 25e9,
}
LAUNCH = (30e-6, 70e-6)  # seconds of the host for one; the narrowest that published speeds allow
BACKWARD = 2  # times the operations of a forward pass
MERGED = 60  # bytes that a die reads and writes to merge a weight and round it (lora/rounding.py)
DRAW = 75e-6  # seconds of the host to draw the weight of a norm; measured, 3,584 numbers
DOCK = 2.5  # seconds: rewards and the transfer dock, by reading
LAUNCHES = Path(__file__).with_name("launches.yaml")
# of TP and of experts in a layer's forward pass, as `groups` has them
COLLECTIVES = {"training": (4, 2), "rollout": (2, 2)}
# {family: {kind of pass: launches in a layer, and outside the layers}}, and what tensor parallelism
# adds in a layer
COUNTED = yaml.safe_load(LAUNCHES.read_text())


@dataclass(frozen=True)
class Terms:
    """Describes what a time is computed for, beside plan and memory: tokens of the mean prompt, the
    mean answer and the longest answer of an iteration; `between`: of HARDWARE.
    """

    prompt: float = 120
    answer: float = 300
    longest: float = 900
    between: float = HARDWARE["910C"]


DEFAULT = Terms()


@dataclass(frozen=True)
class Phase:
    """Describes what one rank does in a phase: kernels launched, and seconds of the die."""

    name: str
    launches: float
    device: float
    more: float = 0.0  # seconds that neither waits for
    alone: float = 0.0  # of the launches, those in which the die has nothing else to do
    late: float = 0.0  # seconds more that the die may take

    def seconds(self, launch: float, late: float = 0.0) -> float:
        """With a host that takes `launch` seconds for one, and so much of `late`."""
        ahead = self.launches - self.alone
        device = self.device + late * self.late
        return max(ahead * launch, device) + self.alone * launch + self.more


def iteration(memory: Memory, terms: Terms = DEFAULT) -> list[Phase]:
    """The phases of an iteration of a plan that fits, of its slowest rank; evaluations are not in
    it.
    """
    rank = _Rank(memory, terms)
    batch = memory.plan.batch
    answers = batch.answers / memory.plan.layout.infer_dp
    phases = [
        rank.sync(),
        rank.prefill(answers),
        rank.decode(answers),
        Phase("reward, dock", 0, 0, DOCK),
    ]
    if memory.plan.lora:
        phases.append(rank.merging())
    if memory.plan.has_reference:
        phases.append(
            rank.logprobs("reference", batch.ref_forward, batch.ref_max_packing_token_size)
        )
    if memory.plan.has_old_logprobs:
        phases.append(
            rank.logprobs("old log-probs", batch.actor_forward, batch.actor_max_packing_token_size)
        )
    return [*phases, rank.update()]


def total(phases: Sequence[Phase]) -> tuple[float, float]:
    """Least and most seconds of all phases."""
    fast, slow = LAUNCH
    return sum(p.seconds(fast) for p in phases), sum(p.seconds(slow, 1) for p in phases)


def token_flops(shape: ModelShape, context: float) -> float:
    """Counts the operations of one token's forward pass through all layers, behind `context`
    others; without the output layer.
    """
    layer = 2 * context * shape.num_attention_heads * shape.head_dim
    layer += shape.hidden_size * shape.num_experts
    for linear in shape.linears:
        layer += linear.inputs * linear.outputs * linear.active
    return 2 * layer * shape.num_hidden_layers


# ---- of a plan ----


def layer_collectives(plan: Plan, side: str = "training") -> int:
    """Collectives that a layer's forward pass waits for: of TP in training 2 all-gathers and 2
    reduce-scatters, in the rollout 2 all-reduces; of experts 2 all-to-alls, dispatch and combine.
    """
    sizes = groups(plan)[side].values()
    return sum(count for count, size in zip(COLLECTIVES[side], sizes) if size > 1)


def stage_work(plan: Plan) -> list[float]:
    """Multiplications a token of each pipeline stage: the layers, with attention over half the
    sequence, and the output layer.
    """
    shape = plan.shape
    layer = token_flops(shape, plan.batch.seq_length / 2) / 2 / shape.num_hidden_layers
    work = [layers * layer for layers in plan.layers]
    work[-1] += shape.vocab_size * shape.hidden_size
    return work


def idle_share(plan: Plan, micro_batches: float | None = None) -> float:
    """Share of an update that the average rank waits for its pipeline: its first and last
    micro-batches, and its slowest stage.

    Args:
        micro_batches: of an update; None: of answers that are as long as they may be.
    """
    work = stage_work(plan)
    pp = plan.layout.pp
    micro_batches = micro_batches or plan.micro_batches
    return 1 - sum(work) / pp / max(work) * micro_batches / (micro_batches + pp - 1)


def groups(plan: Plan) -> dict[str, dict[str, int]]:
    """Sizes of the groups that send data in every layer, of training and of the rollout."""
    layout = plan.layout
    training = {"TP": layout.tp}
    rollout = {"infer TP": layout.infer_tp}
    if plan.shape.moe:
        training["experts"] = layout.expert_ranks
        rollout["vLLM's experts"] = layout.infer_expert_ranks
    return {"training": training, "rollout": rollout}


class _Rank:
    def __init__(self, memory: Memory, terms: Terms):
        self.memory = memory
        self.settings = memory.settings
        self.plan = memory.plan
        self.shape = memory.plan.shape
        self.terms = terms
        self.drawn_norms = memory.settings.drawn_norms * memory.plan.shape.num_hidden_layers

    def _network(self, sizes: Iterable[int]) -> float:
        """Bytes a second that groups of these sizes send."""
        is_across = any(self.plan.layout.node_width % size for size in sizes)
        return NETWORK_SHARE * (self.terms.between if is_across else NETWORK)

    def _seconds(
        self, side: str, flops: float, bytes: float, layers: float, tokens: float, passes: float
    ) -> float:
        """Returns the seconds of the die in training or in the rollout, which computes and reads,
        and then sends the hidden states of `tokens` tokens in each of `layers` layers, in so many
        passes.
        """
        computing = max(flops / FLOPS / SHARES[side], bytes / READ)
        collectives = layers * layer_collectives(self.plan, side)
        sent = tokens * self.shape.hidden_size * BF16
        network = self._network(groups(self.plan)[side].values())
        return computing + collectives * (passes * LATENCY + sent / network)

    def _launched(self, kind: str, layers: int, tp: int) -> tuple[int, int]:
        """Returns the launches of a step of vLLM's or of a micro-batch: in the layers, and outside
        them.
        """
        layer, outside = COUNTED[self.shape.model_type][kind]
        if tp > 1:
            layer += COUNTED["tensor_parallel"].get(kind, 0)
        return layers * layer, outside

    def _flops(self, context: float) -> float:
        """Counts the operations of one token's forward pass with the output layer."""
        return token_flops(self.shape, context) + 2 * self.shape.hidden_size * self.shape.vocab_size

    # ---- vLLM ----

    def prefill(self, answers: float) -> Phase:
        layers = self.shape.num_hidden_layers
        tp = self.plan.layout.infer_tp
        tokens = answers * self.terms.prompt
        passes = ceil(tokens / self.plan.batch.max_num_batched_tokens)
        flops = tokens * token_flops(self.shape, self.terms.prompt / 2) / tp
        weights = passes * sum(rollout_weights(self.plan)) * BF16
        device = self._seconds("rollout", flops, weights, layers, tokens, passes)
        launches = sum(self._launched("prefill", layers, tp)) + 2 * self.drawn_norms
        more = answers / self.settings.answers_of_draw * self.drawn_norms * DRAW
        return Phase("prefill", passes * launches, device, more)

    def decode(self, answers: float) -> Phase:
        """As many steps as the longest answer has tokens, and those that answers wait for a place
        of the others; in the mean step as many sequences as there are tokens for.
        """
        layers = self.shape.num_hidden_layers
        tp = self.plan.layout.infer_tp
        kv_token = self.memory.kv_token
        most = int(self.memory.kv_cache / kv_token / (self.terms.prompt + self.terms.answer))
        most = min(self.settings.max_num_seqs, most)
        waiting = max(answers - most, 0)
        steps = self.terms.longest + waiting * self.terms.answer / max(most, 1)
        alive = answers * self.terms.answer / steps
        context = self.terms.prompt + self.terms.answer / 2
        dense, experts = rollout_weights(self.plan)
        weights: float = dense
        if self.shape.moe:  # of a rank's experts those that the tokens of its group choose
            chosen = self.shape.num_experts_per_tok / self.shape.num_experts
            weights += experts * (1 - (1 - chosen) ** (alive * self.plan.layout.infer_ep))
        bytes = weights * BF16 + alive * context * kv_token
        step = self._seconds("rollout", self._flops(context) * alive / tp, bytes, layers, alive, 1)
        kind = "decode" if self.settings.enforce_eager or most > LARGEST else "graph"
        kernels, _ = self._launched("decode", layers, tp)
        step += kernels * KERNEL
        # what samples and prepares the next step; each sequence draws by a seed of its own
        inside, outside = self._launched(kind, layers, tp)
        if self.drawn_norms:  # a row of the table and a product for each norm; whose row it is
            outside += 1
            inside += 2 * self.drawn_norms * (kind == "decode")
        alone = outside + alive
        return Phase("decode", steps * (inside + alone), steps * step, alone=steps * alone)

    # ---- training ----

    def _over_answers(
        self, name: str, launches: float, passes: float, answers: int, tokens: int, epochs: int = 1
    ) -> Phase:
        """`passes` times the forward pass over a rank's answers of an iteration, in micro-batches of
        so many answers, or so many tokens, each of so many launches; with what a rank waits for its
        pipeline.
        """
        plan = self.plan
        layout = plan.layout
        length = self.terms.prompt + self.terms.answer
        share = plan.share * length
        micro_batches: float = plan.share / answers
        if plan.batch.use_dynamic_bsz:
            micro_batches = ceil(share / tokens)
        micro_batches *= epochs
        passes *= epochs
        flops = self._flops(length / 2) * passes * share / layout.tp / layout.pp
        layers = passes * max(plan.layers)
        device = self._seconds("training", flops, 0, layers, share / layout.tp, micro_batches)
        busy = 1 - idle_share(plan, micro_batches)
        late = flops / FLOPS * (1 / LEAST_SHARE - 1 / SHARES["training"])
        return Phase(name, micro_batches * launches / busy, device / busy, late=late / busy)

    def logprobs(self, name: str, answers: int, tokens: int) -> Phase:
        """A forward pass over all answers, so many answers or tokens a micro-batch."""
        launches = self._launched("forward", max(self.plan.layers), self.plan.layout.tp)
        return self._over_answers(name, sum(launches), 1, answers, tokens)

    def update(self) -> Phase:
        """Computes an update; of a frozen weight the backward pass has no gradient, only its
        input's.
        """
        plan = self.plan
        batch = plan.batch
        tp = plan.layout.tp
        layers = max(plan.layers)
        recomputed = min(self.settings.recompute_layers, layers)
        kept, _ = self._launched("forward", layers - recomputed, tp)
        launches = sum(self._launched("update", layers, tp)) - kept
        passes = 1 + recomputed / layers + BACKWARD - plan.lora
        sizes = batch.micro_batch_size, batch.update_max_packing_token_size
        phase = self._over_answers("update", launches, passes, *sizes, batch.epochs)
        # seconds to sum the gradients of all ranks
        world = plan.layout.world
        _, gradients, _ = trained(plan, self.settings, self.memory.stage)
        more = (world > 1) * self._updates * 2 * gradients.bytes / self._network([world])
        return replace(phase, more=more)

    @property
    def _updates(self) -> int:
        """Counts the updates of an iteration."""
        plan = self.plan
        return plan.batch.epochs * max(1, plan.share // max(plan.mini_share, 1))

    def merging(self) -> Phase:
        """Once an update what the adapted layers multiply with."""
        launches, _ = self._launched("merge", max(self.plan.layers), 1)
        return Phase("merging", self._updates * launches, self._updates * self._merging)

    @property
    def _merging(self) -> float:
        """Seconds of the die to merge each adapted weight once."""
        stages = range(self.plan.layout.pp)
        weights = [adapted_weights(self.plan, self.settings, stage) for stage in stages]
        return max(weights) * MERGED / READ

    # ---- from training to vLLM ----

    def sync(self) -> Phase:
        """Merged weights into vLLM's memory, and what is offloaded to the host and back."""
        plan = self.plan
        settings = self.settings
        training = max(sum(training_weights(plan, stage)) for stage in range(plan.layout.pp))
        rollout = sum(rollout_weights(plan))
        adapters, gradients, optimizer = trained(plan, settings, self.memory.stage)
        weights = size_of(adapters) if plan.lora else training * BF16
        copied = weights * settings.offload_train_param
        copied += gradients.bytes * settings.offload_train_grad
        copied += optimizer.bytes * settings.offload_train_optimizer
        quick, slow = (2 * copied / speed for speed in COPIED)
        device = (training + 2 * rollout) * BF16 / READ + quick + self._merging
        device += abs(rollout - training) * BF16 / self._network(groups(plan)["training"].values())
        launches, _ = self._launched("sync", self.shape.num_hidden_layers, 1)
        return Phase("sync", launches, device, late=slow - quick)
