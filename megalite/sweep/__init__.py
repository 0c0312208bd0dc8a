"""Runs many configurations for a few steps each and collects what they measured; no torch."""
