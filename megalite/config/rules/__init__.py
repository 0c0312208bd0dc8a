"""Rules that a config must satisfy, one topic per module; `validate` runs all of them."""
