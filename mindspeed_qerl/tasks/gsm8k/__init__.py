"""GSM8K: its rows (`convert`), prompts and verifier. Imports in a bare Python."""
