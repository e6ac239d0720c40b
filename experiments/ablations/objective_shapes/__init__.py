"""Weight that every objective gives a token, by autodiff, and what follows from its shape.

See README.md.
"""
