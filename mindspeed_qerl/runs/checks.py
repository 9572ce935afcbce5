"""Whether the numbers of a run can be true, for both engines: each function takes what a run knows
of itself and returns a sentence for what cannot be, or None; `StepChecks` asks them of every step.
docs/results.md has the faults that they were tried on.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from mindspeed_qerl.aqn.schedule import LEAST_NOISE, MOST_NOISE, NoiseLevel
from mindspeed_qerl.common.errors import EngineError
from mindspeed_qerl.common.share import is_too_little
from mindspeed_qerl.recipe.types import Algorithm, Recipe

from .metrics import MetricsRow

Movement = Mapping[str, Mapping[str, float]]  # by LoRA target (lora/proof.py)
Complaint = str | None  # a sentence for what cannot be; None: nothing
NoiseSeen = tuple[float, float]  # standard deviation in one step, expected and measured

# k3 between two correct implementations, noise off, nats per token (measured:
# docs/troubleshooting.md, Wrong numbers).
MOST_K3 = 1e-6  # float32: 2e-13 is normal, below 1e-9 in a model of 30 layers
# float32, experts: one token of 4,480 that rounding sent elsewhere made it 1.1e-6
MOST_K3_EXPERTS = 1e-4
# bfloat16: 3e-5 to 2e-3 here; 6e-4 in Qwen3-8B, 1.5e-3 in Qwen3-30B-A3B (arXiv 2510.11370).
UNUSUAL_K3_BF16 = 5e-3
MOST_K3_BF16 = 5e-2
# Experts, in bfloat16 or with noise: a token goes elsewhere; 0.08 in a random model
MOST_K3_ROUTED = 0.5
# quantized rollouts: NVFP4 has at most 4.1e-3 in the quickstart; wider spacings and models, more
MOST_K3_QUANTIZED = 2.0
# Whatever is on: answers of pure noise (sigma 0.1 in SmolLM2-135M) have 6, and tokens drawn at
# random from a vocabulary of 150,000 some 12
MOST_K3_OF_ALL = 20.0
ROUNDING_K3 = 1e-12  # of float32's rounding, noise off
# k3 / (sigma^2 sensitivity): usual is 1.8 in the quickstart's model, the lowest of 1,800 steps
# 2.8e-3, the highest 1,200, where a token met another expert; 600 to 2,000 in SmolLM2-135M
LEAST_K3 = 3e-4
MOST_RESPONSE = 1e5
NOISY_STEPS = 4  # after which chance is small: one norm of 128 weights gives 1 +- 0.06 in one step
# rounding gives up to 1.15 of any sigma, the rest is for chance
MOST_NOISE_OF_A_STEP = 1.5
# resolutions: the rank rounds base + update to the weights' dtype, and the proof rounds its own
ROUNDINGS = 2
# of a tensor's move; in fp32 rounding loses under 1e-3 (tests/local/test_rollout.py), no sync 1
LOST_SHARE = 0.1
BETWEEN = "k3 between the policy that sampled and the one that is trained"
DIFFERENT = (
    "Usual causes: the temperature of sampling is missing in the trainer's log-probs, the rollout "
    "engine's weights are not the trainer's (a stale sync), the two see other tokens (template, "
    "truncation), or more noise is on than was asked for"
)


def rounding_bound(recipe: Recipe, routed: bool) -> float:
    """Returns the largest k3 of a step without noise that rounding explains, in nats per token.

    Args:
        routed: the model has experts.
    """
    if recipe.hardware_error.rollout or recipe.hardware_error.training:
        return MOST_K3_OF_ALL  # an error of any size that the config asks for
    if recipe.quantization.enabled:
        return MOST_K3_QUANTIZED
    if recipe.model.dtype == "float32":
        return MOST_K3_EXPERTS if routed else MOST_K3
    return MOST_K3_ROUTED if routed else MOST_K3_BF16


def mismatch_fault(
    k3: float, noise: float, sensitivity: float, rounding: float, routed: bool = False
) -> Complaint:
    """Says why k3, from the policy that sampled to the one that is trained, before its update,
    cannot be true: it is above what rounding and the noise explain, or NaN; or with noise on it is
    what rounding alone gives, though the noise is not next to nothing and these tokens leave it
    something to move.

    Args:
        k3: `mismatch/k3`, nats per token. noise: standard deviation of the noise in these answers,
            0 for none.
        sensitivity: `mismatch/sensitivity`. rounding: see `rounding_bound`. routed: the model has
            experts.

    >>> mismatch_fault(7.7e-3, noise=5e-4, sensitivity=0.02, rounding=MOST_K3)[:66]
    'k3 between the policy that sampled and the one that is trained is '
    """
    most = rounding
    if noise:
        most = max(rounding, MOST_K3_ROUTED) if routed else rounding
        most = min(most + MOST_RESPONSE * noise**2 * sensitivity, MOST_K3_OF_ALL)
    state = f"noise of std {noise:.3g} on" if noise else "the noise off"
    if not k3 <= most:  # NaN is not <= either
        return (
            f"{BETWEEN} is {k3:.3g} nats per token with {state}; at most {most:.3g} is explained "
            f"by rounding{' and this noise' if noise else ''}. {DIFFERENT}"
        )
    if k3 < ROUNDING_K3 < LEAST_K3 * noise**2 * sensitivity:
        return (
            f"{BETWEEN} is {k3:.3g} nats per token with {state}, which is impossible. Usual "
            "causes: old log-probs that come from the sampler, or noise that did not reach the "
            "rollout"
        )
    return None


def mismatch_warning(k3: float, noise: float, rounding: float) -> Complaint:
    """Returns what to warn of in bfloat16, where rounding hides what float32 shows; arguments as
    `mismatch_fault`.
    """
    if noise or rounding not in (MOST_K3_BF16, MOST_K3_ROUTED) or k3 <= UNUSUAL_K3_BF16:
        return None
    return (
        f"{BETWEEN} is {k3:.3g} nats per token with the noise off; two correct implementations in "
        f"bfloat16 stay below {UNUSUAL_K3_BF16:g}, unless rounding sends many tokens to other "
        f"experts. {DIFFERENT}"
    )


def loss_fault(metrics: MetricsRow, algorithm: Algorithm) -> Complaint:
    """Checks whether `loss/total`, which backward got, is the sum of its parts with coefficients."""
    kl = algorithm.loss_kl_coefficient
    entropy = algorithm.entropy_coefficient
    parts = (
        metrics["loss/policy"],
        kl * metrics["loss/kl"],
        -entropy * metrics.get("loss/entropy", 0.0),
    )
    total = metrics["loss/total"]
    expected = sum(parts)
    if abs(total - expected) <= 1e-4 * max(map(abs, parts)) + 1e-6:
        return None
    return (
        f"the loss that was backpropagated is {total:.6g}; policy + {kl:g} KL - {entropy:g} "
        f"entropy, by their own metrics, is {expected:.6g}. A sign or a coefficient is wrong where "
        "the loss is put together"
    )


def tokens_fault(counted: float, expected: int, epochs: int, verb: str = "trained") -> Complaint:
    """Checks whether each token that was sampled and kept was in the loss, once an epoch; or
    whether each that has routes was replayed.

    Args:
        counted: tokens in the loss, over all updates and ranks; of routes every layer counts as
            many. expected: tokens of the answers that are kept, end tokens included; or tokens with
            routes, 0 where nothing is replayed. verb: "trained" or "replayed".
    """
    if counted == expected * epochs:
        return None
    return (
        f"{counted:,} tokens were {verb}, and {expected:,} were sampled and kept, to be {verb} "
        f"{epochs} times: {expected * epochs:,}. A mask, or the way of the answers or their routes "
        "to the ranks, loses or repeats some"
    )


def advantages_fault(advantages: np.ndarray, group_size: int) -> Complaint:
    """Checks whether the advantages of each group add up to 0, as every estimator's do.

    Args:
        advantages: [prompts * group_size], a prompt's answers side by side.
    """
    groups = advantages.astype(float).reshape(-1, group_size)
    sums = np.abs(groups.sum(1))
    wrong = ~(sums <= 1e-5 * np.maximum(np.abs(groups).sum(1), 1.0))
    if not wrong.any():
        return None
    return (
        f"the advantages of {wrong.sum()} of {len(groups)} groups do not add up to 0, the first to "
        f"{sums[wrong][0]:.3g}: they are not measured within their groups"
    )


def ends_fault(
    tokens: np.ndarray, mask: np.ndarray, finished: np.ndarray, ends: Collection[int]
) -> Complaint:
    """Checks whether the last trained token of each answer that was not cut off is an end token.

    Args:
        tokens: int [answers, length]. mask: bool [answers, length - 1], True at position t where
            token t + 1 is trained. finished: bool [answers]. ends: ids of the end tokens; without
            any nothing is said.
    """
    last = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)  # where the last True is, plus 1
    last_tokens = tokens[np.arange(len(tokens)), last]
    wrong = np.flatnonzero(finished & mask.any(1) & ~np.isin(last_tokens, list(ends)))
    if not ends or not len(wrong):
        return None
    return (
        f"the last trained token of {len(wrong)} of {finished.sum()} answers that ended by "
        f"themselves is none of the end tokens {sorted(ends)}: the first one's is "
        f"{last_tokens[wrong[0]]}. Where an answer ends would not be learnt"
    )


def noise_fault(sigma: float, nominal: float, seen: Sequence[NoiseSeen]) -> Complaint:
    """Checks whether the noise of a step, and of the run so far, is what its schedule says.

    Over the run so far it is judged from NOISY_STEPS noisy steps on; a single step has an upper
    bound only, since bfloat16 swallows small noise whole.

    Args:
        sigma: of this step, as the rollout engine reports it. nominal: by the schedule. seen:
            (expected, measured) standard deviation of each step with noise so far, this one's last
            if it has any.
    """
    if not math.isclose(sigma, nominal, rel_tol=1e-6):
        return f"the noise of this step has sigma {sigma:.3g}, its schedule says {nominal:.3g}"
    if not nominal or not seen:
        return None
    expected, measured = seen[-1]
    if not measured < MOST_NOISE_OF_A_STEP * expected:
        return (
            f"the noise of this step has a measured std of {measured:.3g}, {expected:.3g} was "
            "asked for: it is put on twice, or scaled twice"
        )
    return noise_share_fault(seen) if len(seen) >= NOISY_STEPS else None


def noise_of(rows: Iterable[MetricsRow]) -> list[NoiseSeen]:
    """The noise of each step that had some, of its metrics."""
    noisy = [row for row in rows if row.get("aqn/expected_std")]
    return [(row["aqn/expected_std"], row["aqn/measured_std"]) for row in noisy]


def noise_share_fault(seen: Sequence[NoiseSeen]) -> Complaint:
    """Checks whether the noise of many steps, (expected, measured) standard deviation of each, is
    as large as it should be, by its root mean square.
    """
    share = math.sqrt(sum(m**2 for _, m in seen) / sum(e**2 for e, _ in seen))
    if LEAST_NOISE < share < MOST_NOISE:
        return None
    return (
        f"the noise of the {len(seen)} noisy steps so far has {share:.2f} of the std that was "
        f"asked for (root mean square), not {LEAST_NOISE:g} to {MOST_NOISE:g}: it is scaled "
        "wrongly, or the rollout's dtype swallows it; then take a larger aqn.sigma_start"
    )


def sync_faults(movement: Movement) -> list[str]:
    """Says of which targets the weights in the rollout engine are not base + (alpha / r) B A.

    movement: the norms `moved` and `expected`, `max_error` and `resolution` of the weights, and
    `lost`, the largest share of one tensor's move that did not arrive.
    """
    return [
        f"{target}: the rollout engine's weights differ from base + (alpha/r) B A by "
        f"{entry['max_error']:.3g}, rounding is {entry['resolution']:.3g}; up to "
        f"{entry['lost']:.0%} of a tensor's move is lost; |update| should be "
        f"{entry['expected']:.3g} and is {entry['moved']:.3g}"
        for target, entry in movement.items()
        if not entry["max_error"] <= ROUNDINGS * entry["resolution"]
        or not entry["lost"] <= LOST_SHARE
    ]


def arrival_faults(movement: Movement, min_arrived: float, arithmetic: str) -> list[str]:
    """Says of which targets less of the update than `min_arrived` reached the rollout engine, a
    sentence each. movement: the share `arrived`, and `arrived_error`. arithmetic: of the engine.

    >>> lost = {"linear_qkv": {"arrived": 0.02, "arrived_error": 0.1}}
    >>> arrival_faults(lost, 0.9, "bfloat16")[0][:71]
    'linear_qkv: 2 % of its update reached the rollout engine (standard erro'
    """
    return [
        f"{target}: {100 * entry['arrived']:.2g} % of its update reached the rollout engine "
        f"(standard error {100 * entry['arrived_error']:.2g} %), and run.min_arrived = "
        f"{min_arrived:g} asks for more. The rest was rounded away on its way into weights of "
        f"{arithmetic}, whose spacing is wider than what was learnt: answers and evaluations are "
        "nearly the base model's. Ways out: generate_config.dtype=float32, "
        "rollout_quantization=none, a larger actor_config.lr; or a lower run.min_arrived, which "
        "accepts it"
        for target, entry in movement.items()
        if is_too_little(entry["arrived"], entry["arrived_error"], min_arrived)
    ]


def logprobs_fault(logprobs: np.ndarray, mask: np.ndarray, tokens: np.ndarray) -> Complaint:
    """Checks whether the log probabilities of the tokens to train are valid; names the first answer
    that has an invalid one.

    Args:
        logprobs: [answers, length], of the trained model. mask: bool, and tokens: int, of the same
            shape; the token that each speaks of.

    >>> tokens = np.array([[7, 8, 9]])
    >>> logprobs, mask = np.array([[-0.1, math.nan, 5.0]]), np.array([[True, True, False]])
    >>> logprobs_fault(logprobs, mask, tokens)[:86]
    'the trained model gave nan as the log probability of token 2 of 2 of the answer [7, 8]'
    """
    wrong = impossible(logprobs) & mask
    if not wrong.any():
        return None
    row, column = np.argwhere(wrong)[0]
    answer = str(tokens[row][mask[row]].tolist())[:200]
    return (
        f"the trained model gave {logprobs[row, column]} as the log probability of token "
        f"{mask[row, :column].sum() + 1} of {mask[row].sum()} of the answer {answer}: nothing "
        "can be trained on it. Lower actor_config.lr, and look at loss/* in metrics.jsonl"
    )


def impossible(logprobs: np.ndarray) -> np.ndarray:
    """Which values cannot be log probabilities, bool of the same shape: NaN, -infinity, or above 0
    by more than rounding.

    >>> impossible(np.array([-0.1, 1e-6, 0.5, math.nan, -math.inf]))
    array([False, False,  True,  True,  True])
    """
    return ~((logprobs <= 1e-3) & (logprobs > -math.inf))


class StepChecks:
    """The checks of one run, step by step; keeps the noise so far, and the warnings given."""

    def __init__(self, recipe: Recipe, routed: bool, earlier: Iterable[MetricsRow]):
        """routed: the model has experts. earlier: metrics of the steps before, of a run that is
        resumed.
        """
        self.recipe = recipe
        self.routed = routed
        self.noise = noise_of(earlier)  # std of each step with noise, expected and measured
        self.warned: set[str] = set()

    def check(
        self,
        step: int,
        values: MetricsRow,
        tokens: int,
        routes: int = 0,
        noise: NoiseLevel | None = None,
    ) -> list[str]:
        """New warnings, each once a run; EngineError for numbers that cannot be true.

        Args:
            values: metrics of `step`, by our names. tokens: to be trained in each epoch. routes:
                tokens whose routes are to be replayed in each epoch. noise: what the step was to
                have; None: none.
        """
        recipe = self.recipe
        std = values.get("aqn/expected_std", 0.0)
        warnings = {"effective sample size": self._uneven(values)}
        if missing := values.get("reward/not_computed"):
            warnings["reward"] = (
                f"the rewards of {missing} answers could not be computed: they are not trained, and "
                "their groups are those of the others"
            )
        self.noise += noise_of([values])
        if noise:
            warnings["noise at its bound"] = self._bound(values, noise)
        nominal = noise.sigma if noise else 0.0
        faults = [noise_fault(values.get("aqn/sigma", 0.0), nominal, self.noise)]
        if tokens:
            k3 = values["mismatch/k3"]
            epochs = recipe.batch.epochs
            rounding = rounding_bound(recipe, self.routed)
            replayed = values.get("routing/replayed_tokens", 0)
            faults += [
                mismatch_fault(k3, std, values["mismatch/sensitivity"], rounding, self.routed),
                loss_fault(values, recipe.algorithm),
                tokens_fault(values["selection/trained_tokens"], tokens, epochs),
                tokens_fault(replayed, routes, epochs, "replayed"),
            ]
            warnings["mismatch"] = mismatch_warning(k3, std, rounding)
        if faults := [fault for fault in faults if fault]:
            raise EngineError(f"step {step} cannot be right:\n" + "\n".join(faults))
        new = {name: text for name, text in warnings.items() if text and name not in self.warned}
        self.warned |= new.keys()
        return list(new.values())

    def _bound(self, values: MetricsRow, level: NoiseLevel) -> Complaint:
        """A warning of a target that sigma cannot reach within its bounds."""
        noise = self.recipe.noise
        reached = values.get("aqn/reached_k3")
        if level.target is None or reached is None:
            return None
        if level.sigma != (noise.sigma_max if reached < level.target else noise.sigma_min):
            return None
        return (
            f"sigma is at its bound of {level.sigma:g}, where the noise makes a k3 of "
            f"{reached:.3g}, and the target is {level.target:.3g}: the run goes on with what the "
            "bound allows (aqn.sigma_min, aqn.sigma_max)"
        )

    def _uneven(self, values: MetricsRow) -> Complaint:
        """A warning of uneven importance weights, with noise on and no correction to apply them."""
        correction = self.recipe.correction
        size = values.get("mismatch/effective_sample_size", 1.0)
        sigma = values.get("aqn/sigma")
        if not (sigma and correction.method == "none" and size < correction.warn_below):
            return None
        return (
            f"with noise of sigma {sigma:.3g} the effective sample size is {size:.0%} of the "
            f"tokens (below rollout_correction.warn_below = {correction.warn_below:g}): the policy "
            "that samples is far from the one that is trained. rollout_correction=token_tis "
            "weights the tokens (docs/algorithms.md)"
        )
