"""One GPT out of parts; configuration decides the family. `shapes` imports no torch."""
