"""How long an iteration takes, phase by phase, on dies of a given kind. Computed from sizes, and
from launches that were counted on emulated NPUs (launches.yaml); never measured on an NPU.

Kernels are launched one by one, but for decode graphs: a phase takes what the host needs to launch
them, or what the die needs to compute, read and send, whichever is more. What a launch costs the
host is not published for a 910C, and is a range.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import yaml

from mindspeed_qerl.families import ModelShape, family_of
from mindspeed_qerl.layout.memory import Memory
from mindspeed_qerl.layout.parts import BF16, Part, adapted_weights, size_of, trained
from mindspeed_qerl.layout.plan import Plan
from mindspeed_qerl.layout.sizes import LARGEST, rollout_weights, training_weights

# What a die has, and the share of it that is reached: Ascend/msmodeling 84fec85
# tensor_cast/device.py; training's share: arXiv 2505.04519; latency: an all-reduce of 160 KB on 16
# dies.
FLOPS = 353.9e12  # bfloat16, dense, a second
SHARES = {"training": 0.3, "rollout": 0.7}
READ = 0.6 * 1.6 * 2**40  # bytes a second of its memory
NETWORK = 196e9  # bytes a second to other dies of the box
NETWORK_SHARE = 0.7
COPIED = 8e9  # bytes a second from and to the host's pageable memory; assumed
LATENCY = 15e-6  # seconds of a collective, however small
# kind of hardware -> bytes a second to the dies of another box
HARDWARE = {
    "910C": 24.5e9,  # boxes joined by RoCE
    "910C-supernode": NETWORK,
    "910B": 25e9,
}
LAUNCH = (20e-6, 80e-6)  # seconds of the host for one
BACKWARD = 2  # times the operations of a forward pass
MERGED = 60  # bytes that a die reads and writes to merge a weight and round it (lora/rounding.py)
DOCK = 2.5  # seconds: rewards and the transfer dock, by reading
LAUNCHES = Path(__file__).with_name("launches.yaml")
# of TP and of experts in a layer's forward pass, as `groups` has them
COLLECTIVES = {"training": (4, 2), "rollout": (2, 2)}
# {family: {kind of pass: launches in a layer, and outside the layers}}, and what tensor parallelism
# adds in a layer
COUNTED = yaml.safe_load(LAUNCHES.read_text())


@dataclass(frozen=True)
class Work:
    """Tokens of the mean prompt, the mean answer and the longest answer of an iteration."""

    prompt: float = 120
    answer: float = 300
    longest: float = 900


@dataclass(frozen=True)
class Terms:
    """Describes what a time is computed for, beside plan and memory; `between`: of HARDWARE."""

    work: Work = Work()
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

    def seconds(self, launch: float) -> float:
        """With a host that takes `launch` seconds for one."""
        ahead = self.launches - self.alone
        return max(ahead * launch, self.device) + self.alone * launch + self.more


def iteration(memory: Memory, terms: Terms = DEFAULT) -> list[Phase]:
    """The phases of an iteration of a plan that fits, of its slowest rank; evaluations and the proof
    that adapters arrived, which come every few iterations, are not in it.
    """
    rank = _Rank(memory, terms)
    phases = [rank.sync(), *rank.rollout(), Phase("reward, dock", 0, 0, DOCK)]
    if memory.plan.lora:
        phases.append(rank.merging())
    batch = memory.plan.batch
    if memory.plan.has_reference:
        sizes = batch.ref_forward, batch.ref_max_packing_token_size
        phases.append(rank.logprobs("reference", *sizes))
    if memory.plan.has_old_logprobs:
        sizes = batch.actor_forward, batch.actor_max_packing_token_size
        phases.append(rank.logprobs("old log-probs", *sizes))
    return [*phases, rank.update()]


def total(phases: Sequence[Phase]) -> tuple[float, float]:
    """Least and most seconds of all phases."""
    low, high = (sum(phase.seconds(launch) for phase in phases) for launch in LAUNCH)
    return low, high


def token_flops(shape: ModelShape, context: float) -> float:
    """Counts the operations of one token's forward pass through all layers, behind `context`
    others; without the output layer.
    """
    layer = 2 * context * shape.num_attention_heads * shape.head_dim
    layer += shape.hidden_size * shape.num_experts
    for linear in family_of(shape).linears(shape):
        layer += linear.inputs * linear.outputs * linear.active
    return 2 * layer * shape.num_hidden_layers


# ---- of a plan ----


def layer_collectives(plan: Plan, side: str = "training") -> int:
    """Collectives that a layer's forward pass waits for: of TP in training 2 all-gathers and 2
    reduce-scatters, in the rollout 2 all-reduces; of experts 2 all-to-alls, dispatch and combine.
    """
    collectives = 0
    for count, size in zip(COLLECTIVES[side], groups(plan)[side].values()):
        if size > 1:
            collectives += count
    return collectives


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
        training["experts"] = layout.tp * layout.ep
        rollout["vLLM's experts"] = layout.infer_tp * layout.infer_ep
    return {"training": training, "rollout": rollout}


class _Rank:
    def __init__(self, memory: Memory, terms: Terms):
        self.memory = memory
        self.plan = memory.plan
        self.work = terms.work
        self.between = terms.between
        self.shape = memory.plan.shape
        self._launches = COUNTED[self.shape.model_type]

    def _seconds(
        self, side: str, flops: float, bytes: float, collectives: float, sent: float
    ) -> float:
        """Returns the seconds of the die in training or in the rollout; it computes and sends one
        after the other.
        """
        computing = flops / FLOPS / SHARES[side]
        reading = bytes / READ
        width = self.plan.layout.node_width
        is_across = any(width % size for size in groups(self.plan)[side].values())
        network = self.between if is_across else NETWORK
        sending = collectives * LATENCY + sent / network / NETWORK_SHARE
        return max(computing, reading) + sending

    def _launches_of(self, kind: str, tp: int) -> tuple[int, int]:
        """Returns the launches of a step of vLLM's or of a micro-batch: in a layer, and outside the
        layers.
        """
        layer, outside = self._launches[kind]
        if tp > 1:
            layer += COUNTED["tensor_parallel"].get(kind, 0)
        return layer, outside

    # ---- vLLM ----

    def rollout(self) -> list[Phase]:
        answers = self.plan.batch.answers / self.plan.layout.infer_dp
        return [self._prefill(answers), self._decode(answers)]

    def _prefill(self, answers: float) -> Phase:
        plan = self.plan
        shape = self.shape
        tp = self.plan.layout.infer_tp
        tokens = answers * self.work.prompt
        passes = ceil(tokens / plan.batch.max_num_batched_tokens)
        flops = tokens * token_flops(shape, self.work.prompt / 2) / tp
        collectives = shape.num_hidden_layers * layer_collectives(plan, "rollout")
        sent = collectives * tokens * shape.hidden_size * BF16
        weights = passes * sum(rollout_weights(plan)) * BF16
        device = self._seconds("rollout", flops, weights, passes * collectives, sent)
        layer, outside = self._launches_of("prefill", tp)
        launches = shape.num_hidden_layers * layer + outside
        return Phase("prefill", passes * launches, device)

    def _decode(self, answers: float) -> Phase:
        """As many steps as the longest answer has tokens, and those that answers wait for a place
        of the others; in the mean step as many sequences as there are tokens for.
        """
        plan = self.plan
        shape = self.shape
        tp = self.plan.layout.infer_tp
        tokens = self.work.prompt + self.work.longest
        most = int(self.memory.kv_cache / self.memory.kv_token / tokens)
        most = min(self.memory.settings.max_num_seqs, most)
        waiting = max(answers - most, 0)
        steps = self.work.longest + waiting * self.work.answer / max(most, 1)
        alive = answers * self.work.answer / steps
        context = self.work.prompt + self.work.answer / 2
        dense, experts = rollout_weights(plan)
        bytes = dense + experts * self._experts_met(alive)
        bytes = bytes * BF16 + alive * context * self.memory.kv_token
        flops = token_flops(shape, context) + 2 * shape.hidden_size * shape.vocab_size
        flops *= alive / tp
        collectives = shape.num_hidden_layers * layer_collectives(plan, "rollout")
        sent = collectives * alive * shape.hidden_size * BF16
        step = self._seconds("rollout", flops, bytes, collectives, sent)
        kind = "decode" if self.memory.settings.enforce_eager or most > LARGEST else "graph"
        # what samples and prepares the next step; each sequence draws by a seed of its own
        layer, outside = self._launches_of(kind, tp)
        alone = outside + alive
        launches = shape.num_hidden_layers * layer + alone
        return Phase("decode", steps * launches, steps * step, alone=steps * alone)

    def _experts_met(self, alive: float) -> float:
        """Share of a rank's experts that the tokens of its group choose in a step."""
        if not self.shape.moe:
            return 0.0
        tokens = alive * self.plan.layout.infer_ep
        chosen = self.shape.num_experts_per_tok / self.shape.num_experts
        return 1 - (1 - chosen) ** tokens

    # ---- training ----

    @property
    def _tokens(self) -> float:
        """Returns the tokens of an answer with its prompt."""
        return self.work.prompt + self.work.answer

    def _micro_batches(self, answers: int, tokens: int) -> float:
        """Counts those of a rank's answers of an iteration: of so many answers, or so many tokens."""
        if self.plan.batch.use_dynamic_bsz:
            return ceil(self.plan.share * self._tokens / tokens)
        return self.plan.share / answers

    def _device(self, passes: float, micro_batches: float) -> float:
        """Seconds of the die of `passes` times the forward pass over a rank's answers."""
        plan = self.plan
        shape = self.shape
        layout = self.plan.layout
        tokens = plan.share * self._tokens
        layers = max(plan.layers)
        flops = token_flops(shape, self._tokens / 2) + 2 * shape.hidden_size * shape.vocab_size
        flops *= passes * tokens / layout.tp / layout.pp
        collectives = passes * layers * layer_collectives(plan)
        sent = collectives * tokens / layout.tp * shape.hidden_size * BF16
        return self._seconds("training", flops, 0, collectives * micro_batches, sent)

    def logprobs(self, name: str, answers: int, tokens: int) -> Phase:
        """A forward pass over all answers, so many answers or tokens a micro-batch."""
        micro_batches = self._micro_batches(answers, tokens)
        layer, outside = self._launches_of("forward", self.plan.layout.tp)
        launches = micro_batches * (max(self.plan.layers) * layer + outside)
        device = self._device(1, micro_batches)
        return self._waiting(name, launches, device, micro_batches)

    def update(self) -> Phase:
        """Computes an update; of a frozen weight the backward pass has no gradient, only its
        input's.
        """
        plan = self.plan
        settings = self.memory.settings
        batch = self.plan.batch
        layers = max(plan.layers)
        recomputed = 0
        if settings.recompute:
            recomputed = min(settings.recompute_num_layers or layers, layers)
        tokens = batch.update_max_packing_token_size
        micro_batches = batch.epochs * self._micro_batches(batch.micro_batch_size, tokens)
        layer, outside = self._launches_of("update", plan.layout.tp)
        forward, _ = self._launches_of("forward", plan.layout.tp)
        launches = layers * layer - (layers - recomputed) * forward + outside
        passes = 1 + recomputed / layers + BACKWARD - plan.lora
        device = self._device(batch.epochs * passes, micro_batches)
        phase = self._waiting("update", micro_batches * launches, device, micro_batches)
        return replace(phase, more=self._reduction())

    @property
    def _updates(self) -> int:
        """Counts the updates of an iteration."""
        plan = self.plan
        return plan.batch.epochs * max(1, plan.share // max(plan.mini_share, 1))

    def merging(self) -> Phase:
        """Once an update what the adapted layers multiply with."""
        layers = max(self.plan.layers)
        launches = self._updates * layers * self._launches["merge"][0]
        return Phase("merging", launches, self._updates * self._merging)

    @property
    def _merging(self) -> float:
        """Seconds of the die to merge each adapted weight once."""
        plan = self.plan
        settings = self.memory.settings
        weights = max(adapted_weights(plan, settings, stage) for stage in range(plan.layout.pp))
        return weights * MERGED / READ

    def _reduction(self) -> float:
        """Seconds to sum the gradients of all ranks, of one update."""
        plan = self.plan
        if plan.layout.world == 1:
            return 0.0
        _, gradients, _ = trained(plan, self.memory.settings, self.memory.stage)
        network = NETWORK if plan.layout.nodes == 1 else self.between
        return self._updates * 2 * gradients.bytes / network / NETWORK_SHARE

    def _waiting(self, name: str, launches: float, device: float, micro_batches: float) -> Phase:
        """With what a rank waits for its pipeline."""
        busy = 1 - idle_share(self.plan, micro_batches)
        return Phase(name, launches / busy, device / busy)

    # ---- from training to vLLM ----

    def sync(self) -> Phase:
        """Merged weights into vLLM's memory, and what is offloaded to the host and back."""
        plan = self.plan
        settings = self.memory.settings
        training = max(sum(training_weights(plan, stage)) for stage in range(plan.layout.pp))
        rollout = sum(rollout_weights(plan))
        moved = (training + 2 * rollout) * BF16
        sent = abs(rollout - training) * BF16
        adapters, gradients, optimizer = trained(plan, settings, self.memory.stage)
        weights = adapters if plan.lora else [Part("weights", training * BF16, "")]
        copied = size_of(weights) * settings.offload_train_param
        copied += gradients.bytes * settings.offload_train_grad
        copied += optimizer.bytes * settings.offload_train_optimizer
        device = self._seconds("training", 0, moved, 0, sent) + 2 * copied / COPIED
        device += self._merging
        return Phase("sync", plan.shape.num_hidden_layers * self._launches["sync"][0], device)
