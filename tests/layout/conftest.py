"""config.json is read by transformers: here in this process, not in one of its own for each file."""

import transformers  # noqa: F401
