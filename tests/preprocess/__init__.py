"""Tests of preprocessing: what it writes, and what it leaves when it is stopped."""
