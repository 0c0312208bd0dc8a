"""Data parallelism: flat gradient buckets and what ranks do with them."""
