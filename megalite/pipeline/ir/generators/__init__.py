"""Named schedules: what each rank computes and in which order, as pure functions of sizes."""
