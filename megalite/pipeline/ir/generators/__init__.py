"""Generators of named schedules, as pure functions of sizes."""
