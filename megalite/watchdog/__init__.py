"""Finds out that a run stands still, who is to blame, and ends it: heartbeats of the ranks, and the process that watches."""
