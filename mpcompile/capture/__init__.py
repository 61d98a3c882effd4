"""Dynamo's graph becomes the graph that passes rewrite."""
