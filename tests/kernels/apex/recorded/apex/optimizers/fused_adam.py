"""A file that identifies NVIDIA's package."""
