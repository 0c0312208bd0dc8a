"""Planners for chains of unequal layers: they cut layers into stages and assign devices to each stage."""
