"""What devices can do: facts, of those at hand and of those known by their data sheets."""
