"""What stands between a caller and the engine: prompts in, text out, two threads."""
