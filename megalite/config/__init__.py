"""Configuration: frozen dataclasses, presets, files, flags and the one validator. Imports only itself."""
