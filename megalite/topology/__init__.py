"""Rank layout, process groups and the shards of tensors. `layout` imports no torch."""
