"""A plan as data, text, one HTML page, and files that training reads. No torch."""
