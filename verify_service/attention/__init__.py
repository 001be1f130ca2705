"""Attention over committed prefixes and draft trees: what a step's rows see, and the computation."""
