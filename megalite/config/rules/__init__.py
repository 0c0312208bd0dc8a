"""What a config must keep, one topic a module; `validate` runs all of it."""
