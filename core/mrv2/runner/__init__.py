"""The native runner: scheduler, KV cache, two-phase step, its plain twin and engine."""
