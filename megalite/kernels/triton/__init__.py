"""Triton kernels, each next to the function that launches it; only the registry imports these modules."""
