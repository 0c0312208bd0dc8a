"""Attention over a sequence that is split among ranks."""
