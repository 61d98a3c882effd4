"""The functions that run when a compiled module, function or graph is called."""
