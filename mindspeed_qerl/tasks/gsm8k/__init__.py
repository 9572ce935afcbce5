"""GSM8K: its rows (`dataset`, `convert`), prompts and verifier. Imports in a bare Python."""
