"""Text to token ids and back: SentencePiece, GPT-2 BPE, Hugging Face and whitespace-separated numbers."""
