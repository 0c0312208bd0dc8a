"""Context parallelism: attention over a sequence that is split over ranks."""
