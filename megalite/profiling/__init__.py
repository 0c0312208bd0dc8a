"""Measures the machine at hand: matrix products, attention, memory, collectives and the cost of small operations."""
