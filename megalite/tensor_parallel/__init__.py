"""Tensor parallelism: mappings, parallel layers, vocab-parallel cross-entropy, layout-independent randomness."""
