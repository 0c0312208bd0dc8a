"""Runs a training: setup, the step, the loop and its reports."""
