"""Sweeps of a config: rows, the trials they become, and the machines that run them (`python -m experiments.launch --help`)."""
