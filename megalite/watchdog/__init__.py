"""Detects a hung run, finds the rank that caused the hang, and ends the run: heartbeats, the watch process, and the end of
processes that have lost their parent."""
