"""One folder a question.

The script, its rules written before the first run, its results, its figures.
"""
