"""Data parallelism: flat gradient buckets and the strategies that reduce them, each imported when a config names it."""
