"""Trainers of other packages, each in a module that imports that package."""
