"""Operators that torch_npu registers on demand."""
