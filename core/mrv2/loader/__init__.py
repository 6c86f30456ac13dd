"""mrv2.loader."""
