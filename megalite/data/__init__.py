"""Token files, datasets, tokenizers, preprocessing and the batch loader. Only `loader` imports torch."""
