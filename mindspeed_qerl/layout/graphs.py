"""Which steps of vLLM's decoding are captured as graphs."""

LARGEST = (
    512  # tokens of a step; vllm-ascend's experts take no more in one (model_runner_v1.py:540)
)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Sequences of a captured step, ascending; a step of fewer is filled up to the next. Each is a
    graph, memory and seconds at the start, and an empty row costs little: weights are read anyway.

    >>> capture_sizes(96)
    [1, 2, 4, 8, 16, 32, 64, 96]
    """
    largest = min(max_num_seqs, LARGEST)
    powers = [2**n for n in range(largest.bit_length()) if 2**n < largest]
    return [*powers, largest]
