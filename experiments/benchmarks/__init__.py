"""Benchmarks of speed, always as a ratio of two methods measured side by side."""
