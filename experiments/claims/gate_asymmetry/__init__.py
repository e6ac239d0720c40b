"""E15.

Whether SAPO is more stable with a sharper gate for negative advantages than for positive ones.
"""
