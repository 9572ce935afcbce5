"""AQN and the proof of arrival in other people's trainers: what runs inside vLLM's workers
(`vllm`), and what verl, TRL and ms-swift need beside it. Torch and vLLM are enough.
"""
