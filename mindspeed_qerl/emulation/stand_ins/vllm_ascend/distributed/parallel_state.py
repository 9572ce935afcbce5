"""The group of the MC2 kernels: MindSpeed-RL sets _MC2 (vllm_parallel_state.py), no kernel here uses it."""

_MC2 = None


def get_mc2_group():
    return _MC2
