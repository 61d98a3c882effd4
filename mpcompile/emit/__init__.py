"""Turns a rewritten graph into a function. Most private parts of torch are used in this room."""
