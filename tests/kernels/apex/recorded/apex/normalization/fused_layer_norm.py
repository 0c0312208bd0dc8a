"""A file by which NVIDIA's package is known."""
