"""Kernels of the hot operations, one file each. torch's support float64 too, so tests can compare exactly."""
