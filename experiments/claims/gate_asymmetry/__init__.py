"""Stability of SAPO with asymmetric gates (E15).

The claim is that SAPO is more stable with a sharper gate for negative advantages than for positive
ones.
"""
