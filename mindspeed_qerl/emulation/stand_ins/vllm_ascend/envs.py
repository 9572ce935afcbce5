"""vllm-ascend's environment variables: none has a meaning here."""
