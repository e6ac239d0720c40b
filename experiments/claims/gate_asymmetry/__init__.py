"""Stability of SAPO with a sharper gate for negative advantages than for positive ones (E15)."""
