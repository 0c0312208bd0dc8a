"""The search for a layout: the legal space as arrays, its memory and time in closed form, the best of it simulated."""
