"""The papers' claims as experiments.

`python -m experiments.claims E20` runs one, `--page` writes the page of all verdicts.
"""
