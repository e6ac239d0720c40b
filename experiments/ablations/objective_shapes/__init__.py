"""Weight that every objective gives a token, by automatic differentiation, and its consequences.

See README.md.
"""
