"""Spread of importance ratios against length, and binding clips, in updates of a small model."""
