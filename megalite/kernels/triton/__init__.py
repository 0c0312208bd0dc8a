"""Triton kernels, each beside the plain function that launches it; the registry alone imports these modules."""
