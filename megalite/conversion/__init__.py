"""Weights from one format to another: megalite's own, Hugging Face's and Megatron-LM's, a tensor at a time."""
