"""mrv2.model_state."""
