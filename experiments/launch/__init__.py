"""Sweeps of a config: rows, the trials made from them, and the machines that run these.

Help: `python -m experiments.launch --help`.
"""
