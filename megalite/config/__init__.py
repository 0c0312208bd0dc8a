"""Configuration: frozen dataclasses, presets, files, flags and the one validator. Imports no other package of
megalite."""
