"""Measurements of a running model: what `mrv2 bench` and `mrv2 trace` do, and what benchmarks are made of."""
