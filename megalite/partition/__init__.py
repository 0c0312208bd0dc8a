"""What each rank stores of a model: stages, buckets, activations, memory. No torch."""
