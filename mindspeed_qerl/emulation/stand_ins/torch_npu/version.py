"""The version of torch_npu that goes with torch 2.7.1."""

__version__ = "2.7.1"
