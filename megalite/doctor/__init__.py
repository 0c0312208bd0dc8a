"""Checks of `megalite doctor`: each module examines one part of the machine, and reports findings with remedies."""
