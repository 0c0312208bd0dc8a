"""Tests of megalite.data."""
