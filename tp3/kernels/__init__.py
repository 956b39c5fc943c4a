"""Triton kernels: device primitives, one kernel per file, references beside. They import torch and
triton only.
"""
