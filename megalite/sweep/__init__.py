"""Run many configurations for a few steps each and collect their measurements; no torch."""
