"""Tests of megalite.sweep and its command."""
