"""Measuring the machine."""
