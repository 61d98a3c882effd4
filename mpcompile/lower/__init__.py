"""Turns a rewritten graph into a function."""
