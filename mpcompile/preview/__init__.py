"""Plans for a GPU that this machine does not have."""
