"""Command lines: thin layers over the packages below."""
