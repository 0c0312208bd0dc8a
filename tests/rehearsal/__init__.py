"""The rehearsal of training steps without devices."""
