"""What a trained model is for: text that continues a prompt, and how likely it finds a text."""
