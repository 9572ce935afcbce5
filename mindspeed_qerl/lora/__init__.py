"""Low-rank adapters on megatron-core layers, and what becomes of them."""
