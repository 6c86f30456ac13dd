"""Sampling: parameters, per-row columns, the sampler and its order of operations."""
