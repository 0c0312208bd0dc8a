"""Hugging Face folders: config.json, safetensors files and tokenizer files, read and written family by family."""
