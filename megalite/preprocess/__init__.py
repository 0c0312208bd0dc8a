"""Text to token files: read jsonl, text and parquet, tokenize in workers, resume after a kill; merge, split, verify."""
