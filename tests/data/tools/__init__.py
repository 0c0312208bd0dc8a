"""Tests of megalite.data.tools."""
