"""What a trained model is for: text that goes on from a prompt, and how likely it finds a text."""
