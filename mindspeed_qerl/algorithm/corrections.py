"""Weights for answers that were sampled by another policy than the one that is trained: by noise,
other kernels, other hardware. The names are verl's (docs/algo/rollout_corr.md there).
"""

import torch

from mindspeed_qerl.algorithm.metrics import Mean, Metrics
from mindspeed_qerl.recipe.types import Correction


def correction_weights(
    old_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    correction: Correction,
) -> tuple[torch.Tensor, Metrics]:
    """Returns what the policy loss of each token is multiplied by; r = p_trained / p_sampled, of a
    token or an answer.

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
