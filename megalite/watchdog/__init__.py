"""Detects a hung run, finds the rank that caused the hang, and ends the run: heartbeats and the watch process."""
