"""The run: setting it up, one step of it, the loop, and its reports."""
