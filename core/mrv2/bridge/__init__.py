"""The vLLM host: adapters' models and states inside vLLM's Model Runner V2."""
