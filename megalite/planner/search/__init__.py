"""Search for the best layout: legal layouts as arrays, closed forms for memory and time, simulation of the best."""
