"""The version. pyproject.toml and the package both read it from this file."""

__version__ = "0.3.0"
