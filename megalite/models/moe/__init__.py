"""Mixture of experts: router, capacity, dispatch between ranks, and the experts."""
