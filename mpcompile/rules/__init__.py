"""What is known about operators, and what a user may ask for."""
