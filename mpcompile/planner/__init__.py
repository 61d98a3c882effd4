"""The cost of each precision, and the assignment of precisions that costs least."""
