"""Compare a layout with one rank on the CPU. docs/parity.md explains the output."""
