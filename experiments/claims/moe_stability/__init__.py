"""Collapse of mixtures of experts under GRPO, with and without replayed routes, and GSPO (E6)."""
