"""Promise 1 as a tool: any layout against one rank, on CPU. docs/parity.md says how to read its answer."""
