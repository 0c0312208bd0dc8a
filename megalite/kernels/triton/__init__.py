"""Triton kernels, each next to the plain function that launches it; the registry alone imports these modules."""
