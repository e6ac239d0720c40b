"""Eight lectures as notebooks.

Each is a jupytext pair: a script (`.py`, the source) and a notebook with its outputs (`.ipynb`, for
reading).
"""
