"""Tensor parallelism: autograd mappings, split layers, vocab-parallel cross-entropy, layout-free randomness."""
