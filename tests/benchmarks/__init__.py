"""Tests of what the benchmarks compute, not of their timings."""
