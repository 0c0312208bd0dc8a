"""Lossy means over ranks, with error feedback."""
