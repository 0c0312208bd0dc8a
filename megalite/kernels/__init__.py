"""Kernels of the hot operations, one file each. The torch kernels support float64 too, so tests can compare exactly."""
