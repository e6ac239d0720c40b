"""Spread of importance ratios with length, and the clips that bind, in updates of a small model."""
