"""Drift of routes under reinforcement learning, and the effect of replaying them."""
