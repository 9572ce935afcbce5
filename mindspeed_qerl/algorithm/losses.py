"""The loss: what is trained, and what is logged about it. docs/algorithms.md has each option's
formula and paper.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from mindspeed_qerl.common.errors import ConfigError
from mindspeed_qerl.common.imports import load
from mindspeed_qerl.recipe.types import Algorithm, Correction

from .metrics import Mean, Metrics, entropy_metrics, kl_estimate, mismatch


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log p(tokens) under softmax(logits / temperature).

    Args:
        logits: [batch, length, vocab], where position t predicts tokens[:, t]. tokens: int64
            [batch, length].

    Returns:
        float32 [batch, length].
    """
    logits = logits.float() / temperature
    return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature) over the whole vocabulary, in nats.

    Args:
        logits: [batch, length, vocab].

    Returns:
        float32 [batch, length].

    >>> token_entropy(torch.zeros(1, 1, 4), temperature=1.0).exp()
    tensor([[4.]])
    """
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. What stands outside the mask, even NaN or infinity, changes neither the loss
    nor its gradient.

    Attributes:
        logprobs: float [batch, length], of the policy that is trained, with its gradient.
        old_logprobs: [batch, length], of that policy before this iteration's first update.
        rollout_logprobs: [batch, length], of the policy that sampled.
        advantages: [batch], one per answer.
        mask: bool [batch, length], True on completion tokens; an answer without any is not trained.
        reference_logprobs: [batch, length], of the base model, or None where there is no KL term.
        entropy: [batch, length], of the trained policy's distribution, with its gradient where
            there is an entropy bonus; or None.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def without_padding(self) -> "LossInputs":
        """Returns the same inputs with zeros outside the mask."""
        padded = {
            field: _inside(self.mask, values)
            for field, values in vars(self).items()
            if values is not None and field not in ("advantages", "mask")
        }
        return replace(self, **padded)


# the loss of each token, and by name what is logged of each, [batch, length]
PolicyLossResult = tuple[Tensor, dict[str, Tensor]]
PolicyLoss = Callable[[LossInputs, Algorithm], PolicyLossResult]
# verl's bound of log(p_new / p_old): exp() of float32 overflows at 88, and its gradient is NaN then
MOST_LOG_RATIO = 20.0


def denominator(mask: Tensor, algorithm: Algorithm) -> Tensor:
    """Returns what the sum that `loss` returns is divided by, in the whole mini-batch, float64 []:
    add up those of its micro-batches.

    token-mean: its tokens (DAPO, arXiv 2503.14476). seq-mean-*: its answers that have tokens;
    seq-mean-token-sum-norm: those times loss_scale_factor (Dr. GRPO, arXiv 2503.20783).

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> denominator(mask, Algorithm(loss_agg_mode="token-mean"))
    tensor(3., dtype=torch.float64)
    """
    if algorithm.loss_agg_mode == "token-mean":
        return mask.sum().double()
    answers = mask.any(1).sum().double()
    if algorithm.loss_agg_mode == "seq-mean-token-sum-norm":
        assert algorithm.loss_scale_factor is not None, "the reader gives it its default"
        return answers * algorithm.loss_scale_factor
    return answers


def loss(
    inputs: LossInputs, algorithm: Algorithm, correction: Correction
) -> tuple[Tensor, Metrics]:
    """The loss of one micro-batch as a sum, and its metrics: policy + loss_kl_coefficient KL -
    entropy_coefficient entropy.

    Divided by the `denominator` of the whole mini-batch it does not depend on how that is cut into
    micro-batches.
    """
    inputs = inputs.without_padding()
    mask = inputs.mask
    count = denominator(mask, algorithm)
    metrics = mismatch(inputs.rollout_logprobs, inputs.old_logprobs, mask)
    per_token, of_tokens = policy_loss(algorithm.loss_mode)(inputs, algorithm)
    if correction.method != "none":
        weights, weight_metrics = correction_weights(
            inputs.old_logprobs, inputs.rollout_logprobs, mask, correction
        )
        per_token = per_token * weights
        metrics |= weight_metrics

    def total_of(values: Tensor) -> Tensor:
        values = _inside(mask, values)
        if algorithm.loss_agg_mode == "seq-mean-token-mean":
            values = values / mask.sum(1, keepdim=True).clamp(min=1)
        return values.sum()

    def mean(values: Tensor) -> Mean:
        return Mean(values.detach().double(), count)

    total = total_of(per_token)
    metrics["loss/policy"] = mean(total)
    metrics["loss/kl"] = Mean(0.0, count)
    if algorithm.loss_has_kl:
        kl_per_token = kl_estimate(
            inputs.logprobs, inputs.reference_logprobs, algorithm.kl_penalty, MOST_LOG_RATIO
        )
        kl = total_of(kl_per_token)
        metrics["loss/kl"] = mean(kl)
        if algorithm.loss_kl_coefficient:
            total = total + algorithm.loss_kl_coefficient * kl
    if algorithm.entropy_coefficient:
        entropy = total_of(inputs.entropy)
        total = total - algorithm.entropy_coefficient * entropy
        metrics["loss/entropy"] = mean(entropy)
    if inputs.entropy is not None:
        metrics |= entropy_metrics(inputs.entropy, mask)
    prefix = "" if algorithm.loss_mode in POLICY_LOSSES else "policy_loss/"
    for name, values in of_tokens.items():
        values = _inside(mask, values.detach().double())
        metrics[prefix + name] = Mean(values.sum(), mask.sum())
    metrics["loss/total"] = mean(total)
    return total, metrics


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: Correction
) -> tuple[Tensor, Metrics]:
    """Returns what the policy loss of each token is multiplied by, for answers that were sampled by
    another policy than the one that is trained: by noise, other kernels, other hardware; r =
    p_trained / p_sampled, of a token or an answer. The names are verl's (docs/algo/rollout_corr.md
    there).

    - token_tis: min(r, cap) of each token (truncated importance sampling, Yao et al. 2025,
      fengyao.notion.site/off-policy-rl): the bias of the tokens sampled before stays.
    - sequence_tis: min(product of r, cap) for all tokens of an answer: unbiased up to the cap, of
      large variance.
    - sequence_mask: the same product where it is within [floor, cap], 0 outside (masked importance
      sampling of answers; verl's `rollout_is: sequence` with two thresholds).
    - icepop: r of each token within [floor, cap], 0 outside (masked importance sampling, Ant's
      Ring-1T, arXiv 2510.18855).
    - geometric_mask: 1 for all tokens of an answer whose geometric mean of r is within
      [floor, cap], 0 for others (verl's seq_mean_k1): answers that are too far off are left out.

    A token of weight 0 still counts where the loss is divided by tokens or answers.

    Args:
        old_logprobs, rollout_logprobs: [batch, length], of the policy that is trained, before this
            iteration's first update, and of the one that sampled. mask: bool [batch, length], True
            on completion tokens.

    Returns:
        weights [batch, length] without a gradient, 1 outside the mask for the token methods; and
        their metrics.

    >>> old, sampled = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.4, 0.1]]).log()
    >>> mask = torch.ones(1, 2).bool()
    >>> for method in ("token_tis", "sequence_tis", "sequence_mask", "icepop", "geometric_mask"):
    ...     correction_weights(old, sampled, mask, Correction(method, cap=2.0, floor=0.5))[0]
    tensor([[1.2500, 2.0000]])
    tensor([[2., 2.]])
    tensor([[0., 0.]])
    tensor([[1.2500, 0.0000]])
    tensor([[0., 0.]])
    """
    log_ratio = torch.where(mask, old_logprobs.detach() - rollout_logprobs, 0.0)
    counted = mask
    tokens = mask.sum(1, keepdim=True)
    if correction.method in ("sequence_tis", "sequence_mask", "geometric_mask"):  # of answers
        log_ratio = log_ratio.sum(1, keepdim=True)
        counted = tokens > 0
    if correction.method == "geometric_mask":
        log_ratio = log_ratio / tokens.clamp(min=1)
    ratio = log_ratio.exp()
    if correction.method in ("token_tis", "sequence_tis"):
        name = "truncated_fraction"
        changed = ratio > correction.cap
        weights = ratio.clamp(max=correction.cap)
    else:
        name = "masked_fraction"
        changed = (ratio < correction.floor) | (ratio > correction.cap)
        kept = torch.ones_like(ratio) if correction.method == "geometric_mask" else ratio
        weights = torch.where(changed, 0.0, kept)  # a product would make NaN of infinity
    fraction = Mean((changed & counted).sum(), counted.sum())
    return weights.expand(mask.shape), {f"rollout_correction/{name}": fraction}


# ---- the policy's part, by algorithm.loss_mode ----


def vanilla(inputs: LossInputs, algorithm: Algorithm) -> PolicyLossResult:
    """PPO's clipped loss of each token's ratio p_new / p_old (arXiv 1707.06347), with one bound
    below and one above (DAPO) and, where the advantage is negative, one on the loss itself
    (clip_ratio_c: dual clip, arXiv 1912.09729).
    """
    return _clipped(inputs.logprobs - inputs.old_logprobs, inputs.advantages, algorithm)


def gspo(inputs: LossInputs, algorithm: Algorithm) -> PolicyLossResult:
    """`vanilla` of each answer's ratio, the geometric mean of its tokens' (arXiv 2507.18071); its
    value is the answer's, its gradient each token's share (verl's GSPO-token).
    """
    log_ratio = inputs.logprobs - inputs.old_logprobs
    of_answer = log_ratio.sum(1, keepdim=True) / inputs.mask.sum(1, keepdim=True).clamp(min=1)
    log_ratio = inputs.logprobs - inputs.logprobs.detach() + of_answer.detach()
    return _clipped(log_ratio, inputs.advantages, algorithm)


def cispo(inputs: LossInputs, algorithm: Algorithm) -> PolicyLossResult:
    """-clip(ratio) A log p, where the clipped ratio has no gradient (arXiv 2506.13585): every token
    is trained.
    """
    ratio = _ratio(inputs.logprobs.detach() - inputs.old_logprobs)
    least = 1 - algorithm.clip_low
    most = 1 + algorithm.clip_high
    per_token = -ratio.clamp(least, most) * inputs.advantages.unsqueeze(1) * inputs.logprobs
    return per_token, _fractions(ratio < least, ratio > most)


def sapo(inputs: LossInputs, algorithm: Algorithm) -> PolicyLossResult:
    """-A 4 / tau sigmoid(tau (ratio - 1)), tau = tau_pos where A > 0, else tau_neg (arXiv
    2511.20347): a gate that closes softly instead of a bound. Nothing is clipped.
    """
    advantages = inputs.advantages.unsqueeze(1)
    ratio = _ratio(inputs.logprobs - inputs.old_logprobs)
    tau = torch.where(advantages > 0, algorithm.tau_pos, algorithm.tau_neg)
    return -advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau, {}


def _ratio(log_ratio: Tensor) -> Tensor:
    """p_new / p_old, at most e^20 and at least e^-20, where it has no gradient."""
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _clipped(log_ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> PolicyLossResult:
    advantages = advantages.unsqueeze(1)
    ratio = _ratio(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    per_token = torch.maximum(unclipped, clipped)
    if algorithm.clip_ratio_c is not None:
        dual_clipped = torch.minimum(per_token, -advantages * algorithm.clip_ratio_c)
        per_token = torch.where(advantages < 0, dual_clipped, per_token)
    is_clipped = clipped > unclipped
    return per_token, _fractions(is_clipped & (advantages < 0), is_clipped & (advantages > 0))


def _fractions(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}


POLICY_LOSSES: dict[str, PolicyLoss] = {  # by the names of LOSS_MODES
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
}


@cache
def policy_loss(name: str) -> PolicyLoss:
    """The loss called `name`: one of `POLICY_LOSSES`, or your own as "module:function".
    ConfigError where there is none.

    Your own gets a `LossInputs` with zeros outside the mask and the `Algorithm`, and returns the
    loss of each token, [batch, length], and by name what is to be logged of each token, which is
    averaged as `policy_loss/NAME`. Coefficients, KL, corrections and aggregation stay as
    configured, so no token's loss may depend on another answer.
    """
    return load(name, POLICY_LOSSES, "loss", "algorithm.loss_mode")


def try_policy_loss(algorithm: Algorithm) -> None:
    """Call the configured loss on a small batch, whole and answer by answer, before anything
    heavy starts. ConfigError if it raises, or what it returns cannot be trained.
    """
    name = algorithm.loss_mode
    function = policy_loss(name)
    drawn = torch.rand(5, 3, 3, generator=torch.Generator().manual_seed(0))
    policy, old, rollout, reference = -drawn[:4]
    policy.requires_grad_()
    mask = torch.ones(3, 3).tril().bool()  # answers of 1, 2 and 3 tokens
    advantages = torch.tensor([1.0, -1.0, 0.0])  # 0: a group of equal rewards
    known = reference if algorithm.loss_has_kl else None
    whole = LossInputs(policy, old, rollout, advantages, mask, known, drawn[4]).without_padding()

    def called(rows: slice) -> Tensor:
        part = {name: value[rows] for name, value in vars(whole).items() if value is not None}
        inputs = LossInputs(**part)
        per_token, of_tokens = function(inputs, algorithm)
        for what, values in {"the loss": per_token, **of_tokens}.items():
            if values.shape != inputs.mask.shape or not values[inputs.mask].isfinite().all():
                raise ValueError(
                    f"{what!r} must be finite numbers of shape [batch, length] = "
                    f"{[*inputs.mask.shape]}, not {values!r:.120}"
                )
        return per_token[inputs.mask]

    try:
        together = called(slice(None))
        [gradient] = torch.autograd.grad(together.sum(), policy, retain_graph=True)
        alone = torch.cat([called(slice(row, row + 1)) for row in range(3)])
        if not gradient.isfinite().all() or not gradient.any():
            raise ValueError(f"its gradient in the log probabilities is {gradient.tolist()}")
        if not torch.allclose(together, alone, rtol=1e-4):
            raise ValueError(
                "an answer's loss depends on the other answers of its micro-batch: "
                f"{together.tolist()} together, {alone.tolist()} alone"
            )
    except Exception as error:  # whatever a user's function does
        raise ConfigError(
            f"algorithm.loss_mode = {name!r} cannot be trained: {type(error).__name__}: {error}. "
            "It is called as f(inputs, algorithm) and returns (loss, {name: values}), a value for "
            "each token (docs/algorithms.md)"
        ) from error


def _inside(mask: Tensor, values: Tensor) -> Tensor:
    """`values` inside the mask, 0 outside. A product with the mask would keep NaN, and infinity
    would become it; so would the gradient of whatever overflows outside, which is why arguments of
    exp() pass through here first.
    """
    return torch.where(mask, values, 0.0)
