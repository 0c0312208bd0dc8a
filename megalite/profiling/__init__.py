"""Measures this machine: matrix products, attention, memory, collectives and the cost of small operations."""
