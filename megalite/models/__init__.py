"""One GPT for all model families, selected by configuration. `shapes` imports no torch."""
