"""Tests of preprocessing: its output, and its state after an interruption."""
