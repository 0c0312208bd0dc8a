"""Predict the time of a training step on a machine: formulas over numbers or numpy arrays. No torch."""
