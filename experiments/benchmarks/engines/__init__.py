"""Engines (samplers and updates) that are timed against each other, each in its own process."""
