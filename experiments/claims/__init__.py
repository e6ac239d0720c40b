"""Experiments that try the papers' claims.

`python -m experiments.claims E20` runs one of them, and `--page` writes the page of all verdicts.
"""
