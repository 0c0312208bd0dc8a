"""What a layout costs, before any device is rented: cuts, memory and bubbles. No torch."""
