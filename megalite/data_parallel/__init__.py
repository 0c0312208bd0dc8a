"""Data parallelism: flat gradient buckets and the strategies that reduce them."""
