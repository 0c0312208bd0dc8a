"""Predict time, memory and bubbles of layouts before any device is rented. No torch."""
