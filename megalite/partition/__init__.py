"""What each rank holds of a model, said once for training, dry run and planner. No torch."""
