"""Answers of vLLM, and what transformers' model says of them."""

import torch

from mindspeed_qerl.aqn.injector import standard_normal


def drawn(answer) -> tuple[list[int], list[float]]:
    """Token ids of an answer of vLLM's, and the log-probs that they were drawn by."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return list(answer.token_ids), [of_token[token].logprob for token, of_token in pairs]


@torch.no_grad()
def scored(twin, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probs of an answer's tokens by transformers' model."""
    logits = twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def scored_by_draws(twin, clean, seed, level, answers, draws) -> list[torch.Tensor]:
    """Log-probs of `answers`, (prompt, tokens), with the noise of each one's draw on the norms of
    `clean`, weights by module name.
    """
    found = []
    for answer, draw in zip(answers, draws, strict=True):
        for name, weight in clean.items():
            noise = standard_normal(seed, level.step, f"{name}.weight/{draw}", weight.shape)
            noisy = (weight + level.sigma * noise).to(weight.dtype)
            twin.get_parameter(f"{name}.weight").copy_(noisy)
        found.append(scored(twin, *answer))
    return found
