"""Benchmarks: a folder a subject, each run as `python -m benchmarks.SUBJECT.PROGRAM`; see README.md."""
