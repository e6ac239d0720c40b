"""Collapse of a deep mixture of experts, with and without replayed routes (E6)."""
