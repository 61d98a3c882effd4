"""Trainers of other libraries: each module imports the library that it is named after."""
