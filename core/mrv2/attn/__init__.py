"""mrv2.attn."""
