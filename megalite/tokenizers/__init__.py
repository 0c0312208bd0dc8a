"""Text to token ids and back: SentencePiece, GPT-2 BPE, Hugging Face, tiktoken, bytes and numbers. No torch."""
