"""The vLLM host's layer set. Imported by the bridge only, since it imports vLLM."""
