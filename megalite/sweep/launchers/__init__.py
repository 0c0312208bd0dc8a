"""Ways to start a run: on this machine, or as a job of a cluster."""
