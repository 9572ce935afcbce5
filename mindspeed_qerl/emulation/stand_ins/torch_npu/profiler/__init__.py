"""torch_npu.profiler: there is nothing to profile; the profiling options of MindSpeed are to stay
off.
"""

from torch_npu.profiler import dynamic_profile  # noqa: F401
