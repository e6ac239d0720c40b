"""Noise and bias of the stale policy gradient, by objective."""
