"""Optimizers, and schedules of learning rate, weight decay and loss scale."""
