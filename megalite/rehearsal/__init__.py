"""Training steps without devices and without peers: what each rank would do, and a proof that it fits together."""
