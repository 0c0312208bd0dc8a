"""megalite: 3D-parallel GPT pretraining, the same numbers on any layout, the same code on a laptop and a cluster."""

__version__ = "0.1.0"
