"""What a training step takes on a machine: formulas from GEMM to step, over numbers or numpy arrays. No torch."""
