"""Benchmarks: one folder per subject; run as `python -m benchmarks.SUBJECT.PROGRAM`, see README.md."""
