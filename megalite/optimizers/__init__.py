"""Optimizers and the schedules of what they are told: learning rate, weight decay, loss scale."""
