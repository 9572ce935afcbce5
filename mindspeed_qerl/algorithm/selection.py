"""Which answers are trained, and what their length costs them."""

import numpy as np


def groups_with_signal(rewards: np.ndarray, group_size: int) -> np.ndarray:
    """Checks whether the rewards of a prompt's answers differ: others have no advantage and train
    nothing (DAPO's dynamic sampling, arXiv 2503.14476; MindSpeed-RL
    workers/dynamic_sampling.py:84).

    Args:
        rewards: [prompts * group_size], a prompt's answers side by side.

    Returns:
        bool [prompts].

    >>> groups_with_signal(np.array([1.0, 0.0, 1.0, 1.0]), group_size=2)
    array([ True, False])
    """
    groups = rewards.reshape(-1, group_size)
    return (groups != groups[:, :1]).any(1)


def overlong_penalty(
    lengths: np.ndarray, max_tokens: int, buffer: int, factor: float
) -> np.ndarray:
    """Returns what is added to the reward of an answer that nears `max_tokens`: 0 up to max_tokens
    - buffer tokens, from there linearly down to -factor (DAPO's soft overlong punishment;
    MindSpeed-RL models/rule_verifier.py:114-120).

    Args:
        lengths: [answers], tokens. buffer: tokens, 1..max_tokens.

    Returns:
        float64 [answers], at most 0.

    >>> overlong_penalty(np.array([60, 85, 100]), max_tokens=100, buffer=20, factor=1.0)
    array([ 0.  , -0.25, -1.  ])
    """
    beyond = np.clip(lengths - (max_tokens - buffer), 0, buffer)
    return 0.0 - beyond / buffer * factor
