"""The share of an update that arrived, as a run judges it; imports nothing."""

# standard errors by which a share may miss the least one: chance does it in 1 of 700 proofs
ERRORS_OF_SHARE = 3


def is_too_little(share: float, error: float, least: float) -> bool:
    """Returns True if less of the update than `least` arrived, and chance does not explain it; a
    `least` of 0 accepts any share.

    >>> is_too_little(0.8, 0.02, 0.9), is_too_little(0.8, 0.05, 0.9)
    (True, False)
    """
    return bool(least) and not share + ERRORS_OF_SHARE * error >= least
