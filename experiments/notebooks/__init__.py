"""Five lectures as notebooks.

Jupytext pairs of a script (`.py`, the source) and a notebook with its outputs (`.ipynb`, for
reading).
"""
