"""Tests of megalite.doctor."""
