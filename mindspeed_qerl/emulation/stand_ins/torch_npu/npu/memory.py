"""Memory pools, for vLLM's sleep mode (vllm-ascend device_allocator/camem.py), which MindSpeed-RL
does not use.
"""

from mindspeed_qerl.emulation import not_emulated

NPUPluggableAllocator = not_emulated("torch.npu.memory.NPUPluggableAllocator (sleep mode)")
MemPool = not_emulated("torch.npu.memory.MemPool (sleep mode)")
use_mem_pool = not_emulated("torch.npu.memory.use_mem_pool (sleep mode)")
