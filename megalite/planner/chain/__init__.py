"""Planners for chains of unequal layers: which layers make a stage, on how many devices, and on which ones."""
