"""The package's version. A test holds it equal to `pyproject.toml`."""

__version__ = "0.1.0"
