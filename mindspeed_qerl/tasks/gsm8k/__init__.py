"""The task: GSM8K rows (`dataset`, `convert`), prompts (`prompts`) and the verifier (`verifier`). Imports in a bare Python."""
