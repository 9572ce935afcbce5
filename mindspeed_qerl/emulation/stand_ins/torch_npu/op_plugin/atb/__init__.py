"""Those of the Ascend Transformer Boost."""
