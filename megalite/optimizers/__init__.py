"""Optimizers, and the schedules of learning rate, weight decay and loss scale."""
