"""Megatron-LM's checkpoints: `torch` and `torch_dist` read without running anything in them, `torch` written."""
