"""mrv2.debug."""
