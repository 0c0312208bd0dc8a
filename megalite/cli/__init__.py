"""Command-line interface: thin layers over the other packages."""
