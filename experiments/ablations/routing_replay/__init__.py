"""Drift of routers under reinforcement learning, and the effect of replaying their routes.

See README.md.
"""
