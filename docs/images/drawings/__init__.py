"""The drawings of docs/parallelism.md, one module each; `draw.py` writes them all."""
