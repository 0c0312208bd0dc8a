"""What can be done with finished token files: look into them, verify, merge and split them. No torch."""
