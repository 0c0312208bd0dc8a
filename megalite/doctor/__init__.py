"""What `megalite doctor` looks at: each module examines one thing and says what it found and what to fix."""
