"""Rank layout, process groups and the shards of tensors. `layout` and `sharding` import no torch."""
