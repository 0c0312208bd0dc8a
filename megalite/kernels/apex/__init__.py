"""Adapters to the kernels of NVIDIA's apex."""
