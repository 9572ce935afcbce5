"""What each rollout correction leaves of the bias that a noisy sampler brings, and what it costs in
variance.

    python benchmarks/corrections.py    # seconds

Answers of two tokens out of five, so that every answer is enumerated and nothing is sampled: the
gradient of the policy loss in the policy's logits, expected over the sampler's answers, against the
one expected over the policy's own. The sampler is the policy with Gaussian noise on its logits;
means over 200 policies. The bias is the norm of the difference, relative to the exact gradient's
norm; the variance is that of one answer's gradient, relative to the variance without noise; the
effective sample sizes are of tokens and of answers.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # a file of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mindspeed_qerl.common.entry import use_checkout

    use_checkout()

import torch

from mindspeed_qerl.algorithm.losses import LossInputs, loss
from mindspeed_qerl.recipe.types import Algorithm, Correction

VOCABULARY, POLICIES, NOISE = 5, 200, (0.1, 0.3, 0.5)
UNCAPPED = 1e9
CORRECTIONS = [
    Correction("none"),
    Correction("token_tis", cap=UNCAPPED),
    Correction("token_tis", cap=2.0),
    Correction("sequence_tis", cap=UNCAPPED),
    Correction("sequence_tis", cap=2.0),
    Correction("sequence_mask", cap=2.0, floor=0.5),
    Correction("icepop", cap=2.0, floor=0.5),
    Correction("geometric_mask", cap=1.25, floor=0.8),
]


def gradients(
    logits: torch.Tensor, sampler: torch.Tensor, rewards: torch.Tensor, correction: Correction
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every answer of two tokens out of V the gradient of its policy loss, and its probability.

    Args:
        logits, sampler: [V + 1, V], of the policy and of the one that samples; row 0: the first
            token's, row 1 + t: the second's after t. rewards: [V, V], the advantages of the
            answers.

    Returns:
        (gradients in `logits` [V * V, (V + 1) * V], probabilities by `sampler` [V * V]).
    """
    size = logits.shape[1]
    first, second = torch.arange(size).repeat_interleave(size), torch.arange(size).repeat(size)
    rows, columns = (
        torch.stack([torch.zeros_like(first), 1 + first], 1),
        torch.stack([first, second], 1),
    )
    trained = logits.log_softmax(-1)[rows, columns].requires_grad_()  # [V * V, 2]
    sampled = sampler.log_softmax(-1)[rows, columns]
    mask = torch.ones_like(trained, dtype=torch.bool)
    inputs = LossInputs(trained, trained.detach(), sampled, rewards.reshape(-1), mask)
    loss(inputs, Algorithm(kl_coefficient=0.0), correction)[0].backward()
    # d log p(token) / d logits of its row = one-hot - softmax
    of_rows = torch.nn.functional.one_hot(columns, size) - logits.softmax(-1)[rows]
    of_logits = torch.zeros(size * size, *logits.shape, dtype=logits.dtype)
    answers = torch.arange(size * size)
    for token in range(2):
        of_logits[answers, rows[:, token]] += trained.grad[:, token, None] * of_rows[:, token]
    return of_logits.flatten(1), sampled.sum(1).exp()


def moments(of_answers: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Expectation of the gradient, and the sum of its components' variances."""
    mean = probabilities @ of_answers
    return mean, (probabilities @ of_answers.square().sum(1) - mean.square().sum()).item()


def noisy_policy(
    seed: int, noise: float, size: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, the sampler's, rewards) of `gradients`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> torch.Tensor:
        return torch.randn(rows, size, generator=generator, dtype=torch.float64)

    logits = draw(size + 1)
    return logits, logits + noise * draw(size + 1), draw(size)


def effective_sample_sizes(logits: torch.Tensor, sampler: torch.Tensor) -> tuple[float, float]:
    """Expected (E w)^2 / E w^2 of the first token's ratio, and of the answer's."""
    policy, sampled = logits.log_softmax(-1), sampler.log_softmax(-1)
    ratio = policy - sampled
    of_token = 1 / (sampled[0].exp() * (2 * ratio[0]).exp()).sum()
    answers = sampled[0][:, None] + sampled[1:]
    of_answer = 1 / (answers.exp() * (2 * (ratio[0][:, None] + ratio[1:])).exp()).sum()
    return of_token.item(), of_answer.item()


def main() -> int:
    print("| noise on the logits | ESS, token | ESS, answer | correction | bias left | variance |")
    print("|---|---|---|---|---|---|")
    for noise in NOISE:
        draws = [noisy_policy(seed, noise) for seed in range(POLICIES)]
        sizes = torch.tensor(
            [effective_sample_sizes(logits, sampler) for logits, sampler, _ in draws]
        ).mean(0)
        exact = [
            moments(*gradients(logits, logits, rewards, Correction()))
            for logits, _, rewards in draws
        ]
        for number, correction in enumerate(CORRECTIONS):
            bias = variance = 0.0
            for (logits, sampler, rewards), (mean, spread) in zip(draws, exact):
                corrected, its_spread = moments(*gradients(logits, sampler, rewards, correction))
                bias += ((corrected - mean).norm() / mean.norm()).item() / POLICIES
                variance += its_spread / spread / POLICIES
            bounds = {"none": "", "token_tis": "cap", "sequence_tis": "cap"}.get(
                correction.method, "floor, cap"
            )
            limits = (
                "no cap"
                if correction.cap == UNCAPPED
                else ", ".join(
                    f"{getattr(correction, bound):g}" for bound in bounds.split(", ") if bound
                )
            )
            name = correction.method + (f" ({limits})" if limits else "")
            head = f"{noise:g} | {sizes[0]:.2f} | {sizes[1]:.2f}" if not number else " | |"
            print(f"| {head} | {name} | {bias:.1%} | {variance:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
