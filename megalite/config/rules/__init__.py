"""The rules that a config must keep, one topic a module; `validate` runs them all."""
