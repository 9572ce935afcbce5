"""What a worker imports, and what to do where it cannot: the preflight tries it before a run, the
engine meets it in one.
"""

import re

PLATFORM = """
from vllm.platforms import current_platform as it
took = getattr(it, "__name__", type(it).__name__)
assert it.device_type == "npu", f"vLLM took {took}, and ends with: Failed to infer device type"
"""
# In the order in which a worker comes to it: what is told while it goes on, and the code.
STEPS = {
    "torch": "import torch",
    "torch_npu": "import torch_npu",
    # vllm_ascend/worker/worker_v1.py:87
    "torch_npu's ATB operators": (
        "from torch_npu.op_plugin.atb._atb_ops import _register_atb_extensions; "
        "_register_atb_extensions()"
    ),
    "transformers": "import transformers",
    "tensordict": "import tensordict",
    "vllm": "import vllm",
    "vLLM's platform": PLATFORM,
    "mindspeed_rl": "import mindspeed_rl.workers.integrated_worker",
    # with MindSpeed's patches: cli/train_grpo.py:521
    "mindspeed_llm": "import mindspeed_llm.training.arguments",
    "vllm_ascend": "import vllm_ascend.worker.worker_v1",
    "vllm_ascend_C": "import vllm_ascend.vllm_ascend_C",
}
# The cause is what the interpreter knows last: torch and vLLM raise errors of their own from it.
PROBE = f"""
import sys, time
started = time.monotonic()
for what, code in {STEPS!r}.items():
    print("importing", what, file=sys.stderr, flush=True)
    try:
        exec(code)
    except BaseException as error:
        while error.__cause__:
            error = error.__cause__
        words = " ".join(str(error).split())
        print(f"cannot import {{what}}: {{type(error).__name__}}: {{words[:300]}}", flush=True)
        break
else:
    print(f"imported in {{time.monotonic() - started:.0f}} s", flush=True)
"""
SOURCE = "source /usr/local/Ascend/cann/set_env.sh && source /usr/local/Ascend/nnal/atb/set_env.sh"
DRIVER = (
    "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64/driver:"
    "$LD_LIBRARY_PATH    # /usr/local/Ascend/driver, mapped into the container with -v"
)
# A pattern in an import's error -> what to do; the first that matches counts, the last always does.
FIXES = {
    r"No module named '(?!mindspeed|megatron|vllm_ascend)(\w+)": (
        r"pip install \1    # in the version of docs/ascend.md, Install"
    ),
    r"libascend_hal": DRIVER,
    r"static TLS block": (
        "export LD_PRELOAD=LIBRARY:$LD_PRELOAD    # the library that the error names: aarch64 has "
        "little static TLS, and the first to ask gets it"
    ),
    # vllm-ascend issues 1144, 3998 and 750
    r"AsdOps|Mki|3atb|libatb|libop_plugin_atb": (
        f"In a new shell, where python3 has torch: {SOURCE}    # libatb is of NNAL: another "
        "version's, or for torch's other C++ ABI"
    ),
    r"GLIBC|GLIBCXX|CXXABI": (
        "Build it on this image (docs/ascend.md, Install), in place of a wheel or a copy of "
        "another's"
    ),
    # triton-ascend issue 328
    r"undefined symbol: (Msprof|acl|Hccl|rt[A-Z])": (
        "CANN 8.5.0 and torch_npu 2.7.1 (docs/ascend.md, Install): one of them is another"
    ),
    r"lib(hccl|ascendcl|runtime|ge_\w+|msprofiler|profapi|c_sec|register)\S*: cannot open": SOURCE,
    r"cudnn|libcuda|libcublas|transformer_engine": (
        "pip uninstall --yes transformer_engine transformer_engine_cu12 flash_attn    # CUDA's "
        "packages, which Megatron takes if they are there"
    ),
    r"(?i)numpy": "pip install numpy==1.26.4",
    r"(?i)0 active drivers|triton": "pip uninstall --yes triton triton-ascend",
    r"infer device type|vllm_ascend": (
        "unset VLLM_PLUGINS, and (cd vllm-ascend && COMPILE_CUSTOM_KERNELS=1 python setup.py "
        "install)    # docs/ascend.md, Install"
    ),
    r"": "docs/ascend.md, Install: the versions that go together",
}


def way_out(error: str) -> str:
    """Returns what to type after an import's error.

    >>> way_out("No module named 'word2number.w2n'")
    'pip install word2number    # in the version of docs/ascend.md, Install'
    """
    for pattern, fix in FIXES.items():
        if match := re.search(pattern, error):
            return match.expand(fix)
