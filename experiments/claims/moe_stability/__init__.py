"""Collapse of mixtures of experts under GRPO and GSPO, with and without replayed routes (E6)."""
