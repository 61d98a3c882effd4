"""What either precision costs, and the cut that costs least."""
