"""Seeds for each purpose and step, so that no draw depends on how many came before it."""

import hashlib


def derived_seed(seed: int, purpose: str, step: int) -> int:
    """A 32-bit seed that depends on its arguments only (SHA-256)."""
    return int.from_bytes(
        hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()[:4], "little"
    )
